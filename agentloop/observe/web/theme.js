// Sets the theme before the first paint, so this script is not deferred.
"use strict";
try {
  const chosen = localStorage.getItem("agentloop.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is not allowed: use the system's theme.
}
