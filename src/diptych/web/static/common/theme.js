/** Light, dark, or as the system says; and the colours for canvases. */

const ROOT = document.documentElement;
const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** "light" or "dark": what is shown now. */
const theme = () => ROOT.dataset.theme || (SYSTEM.matches ? "dark" : "light");

function choose(name) {
  ROOT.dataset.theme = name;
  try {
    localStorage.setItem("diptych-theme", name);
  } catch {
    // Not remembered where there is no storage; the page works all the same.
  }
  for (const listener of listeners) listener();
}

/** Call it whenever the colours change. */
export function onThemeChange(listener) {
  listeners.add(listener);
}

SYSTEM.addEventListener("change", () => listeners.forEach((listener) => listener()));

/** Colours of the palette as they are now, for canvases: ["prefill"] -> {prefill: "rgb(10, 111, 181)"}. */
export function colours(names) {
  const probe = document.createElement("i"); // a canvas does not know var() and light-dark(): an element resolves them
  probe.hidden = true;
  document.body.append(probe);
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(found);
}

/** Make a button the switch between light and dark. */
export function themeButton(button) {
  const update = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "☾ Dark" : "☀ Light";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
  };
  button.addEventListener("click", () => choose(theme() === "dark" ? "light" : "dark"));
  onThemeChange(update);
  update();
}
