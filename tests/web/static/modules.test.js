/** Modules fit together: there is no bundler that would notice a wrong name. */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const STATIC = fileURLToPath(new URL("../../../src/diptych/web/static", import.meta.url));
const files = readdirSync(STATIC, { recursive: true }).filter((name) => name.endsWith(".js")).map((name) => join(STATIC, name));

/** The names that a module exports. */
const exportsOf = (text) => new Set([...text.matchAll(/^export (?:async )?(?:function|const|class) (\w+|\$)/gm)].map(([, name]) => name));

test("every import names a file that is there and what it exports", () => {
  let seen = 0;
  for (const file of files) {
    for (const [, names, path] of readFileSync(file, "utf8").matchAll(/^import \{ ([^}]+) \} from "([^"]+)";$/gm)) {
      const offered = exportsOf(readFileSync(join(dirname(file), path), "utf8"));
      for (const name of names.split(", ")) {
        assert.ok(offered.has(name.split(" as ")[0]), `${file}: ${path} has no ${name}`);
        seen++;
      }
    }
  }
  assert.ok(seen > 100);
});

test("imports are written in the way that pages can find them", () => {
  for (const file of files) {
    const text = readFileSync(file, "utf8");
    const lines = text.split("\n").filter((line) => line.startsWith("import "));
    for (const line of lines) assert.match(line, /^import \{ .* \} from "\.\.?\/[\w/-]+\.js";$/, file);
  }
});

test("everything that is exported is used by another module or by a test", () => {
  const tests = readdirSync(fileURLToPath(new URL(".", import.meta.url))).filter((name) => name.endsWith(".js"));
  const everything = [...files, ...tests.map((name) => fileURLToPath(new URL(name, import.meta.url)))].map((file) => [file, readFileSync(file, "utf8")]);
  for (const [file, text] of everything.slice(0, files.length)) {
    for (const name of exportsOf(text)) {
      const imports = new RegExp(`^.*\\{.*[ ,]${name.replace("$", "\\$")}[ ,].*\\}.*(from|import\\()`, "m");
      const users = everything.filter(([other, its]) => other !== file && imports.test(its));
      assert.ok(users.length, `${file} exports ${name} for nobody`);
    }
  }
});
