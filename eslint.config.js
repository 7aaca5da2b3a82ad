/** Rules for the pages' JavaScript: what is wrong, what is dead, and the project's words. Layout is nobody's business here. */

import js from "@eslint/js";

const named = (names) => Object.fromEntries(names.split(" ").map((name) => [name, "readonly"]));

/** What modules may use of the browser. */
const BROWSER = named(
  "AbortController CSS CustomEvent DOMMatrix Element Event EventTarget FormData RadioNodeList "
  + "ResizeObserver TextDecoderStream URL URLSearchParams addEventListener cancelAnimationFrame "
  + "clearInterval clearTimeout devicePixelRatio document fetch getComputedStyle history innerHeight "
  + "localStorage location matchMedia navigator performance requestAnimationFrame sessionStorage "
  + "setInterval setTimeout window",
);
const NODE = named("ReadableStream Response TextEncoder URL URLSearchParams globalThis setTimeout");

export default [
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      complexity: ["error", 20],
      "consistent-return": "error",
      "default-case-last": "error",
      eqeqeq: "error",
      "id-denylist": ["error", "one"],
      "max-lines": ["error", 400],
      "max-lines-per-function": ["error", 60],
      "no-await-in-loop": "off",
      "no-constructor-return": "error",
      "no-duplicate-imports": "error",
      "no-eval": "error",
      "no-implicit-coercion": "error",
      "no-implied-eval": "error",
      "no-lonely-if": "error",
      "no-new-func": "error",
      "no-promise-executor-return": "error",
      "no-self-compare": "error",
      "no-shadow": "error",
      "no-template-curly-in-string": "error",
      "no-throw-literal": "error",
      "no-undef-init": "error",
      "no-unneeded-ternary": "error",
      "no-unreachable-loop": "error",
      "no-unused-private-class-members": "error",
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-useless-computed-key": "error",
      "no-useless-concat": "error",
      "no-useless-rename": "error",
      "no-useless-return": "error",
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
      "prefer-object-has-own": "error",
      "prefer-template": "error",
      yoda: "error",
    },
  },
  { files: ["src/diptych/web/static/**/*.js"], languageOptions: { globals: BROWSER } },
  { files: ["src/diptych/web/static/common/theme-early.js"], languageOptions: { sourceType: "script" } },
  { files: ["tests/web/static/**/*.js"], languageOptions: { globals: NODE }, rules: { "max-lines-per-function": "off" } },
];
