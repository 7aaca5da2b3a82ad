// Before the first paint: the theme that was chosen here before. (The only script that is not a module.)
try {
  const chosen = localStorage.getItem("diptych-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage in this browser: the system's theme it is.
}
