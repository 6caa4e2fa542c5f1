// The theme before anything is painted; so this script alone is not deferred.
"use strict";
try {
  const chosen = localStorage.getItem("agentloop.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is forbidden: the system's theme, then.
}
