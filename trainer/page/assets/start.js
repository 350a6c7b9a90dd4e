"use strict";
// The address decides what is shown; what is shown asks again while it is looked at; a few keys.
F.EVERY = 1000; // milliseconds

F.go = async () => {
  const { parts } = F.place(), [kind = "", ...rest] = parts;
  F.refresh = null;
  F.clearPlots();
  const alone = F.told && F.told.names.length === 1 ? F.told.names[0] : null;
  document.getElementById("crumbs").replaceChildren(...[F.a("Flotilla runs", []), ...(kind ? [" / ", rest[0] || kind] : [])]);
  document.title = [rest[0], "Flotilla"].filter(Boolean).join(" – ");
  const turn = (F.turned = (F.turned || 0) + 1);
  try {
    if (kind === "run") await F.views.run(...rest);
    else if (kind === "compare") await F.views.compare(...rest);
    else if (alone) await F.views.run(alone);
    else await F.views.runs();
  } catch (error) { if (turn === F.turned) F.show(F.failed(error), F.h("p", {}, F.a("All runs", []))); }
};

F.tick = async () => {
  const status = document.getElementById("live");
  if (F.refresh && !F.told && document.visibilityState === "visible") {
    const asked = F.refresh;
    try { await asked(); status.textContent = "live"; status.className = "good small"; } catch (error) { status.textContent = `not live: ${error.message}`; status.className = "bad small"; }
  }
  setTimeout(F.tick, F.EVERY);
};

F.setTheme = (theme) => { document.documentElement.dataset.theme = theme; };
const asked = matchMedia("(prefers-color-scheme: dark)");
let kept = null;
try { kept = localStorage.getItem("flotilla-theme"); } catch { /* a file in a sandbox has no storage */ }
F.setTheme(kept || (asked.matches ? "dark" : "light"));
asked.addEventListener("change", () => { if (!kept) { F.setTheme(asked.matches ? "dark" : "light"); F.go(); } });
document.getElementById("theme").addEventListener("click", () => {
  kept = F.theme() === "dark" ? "light" : "dark";
  try { localStorage.setItem("flotilla-theme", kept); } catch { /* as above */ }
  F.setTheme(kept);
  F.go();
});

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) { if (event.key === "Escape") event.target.blur(); return; }
  const follow = (rel) => document.querySelector(`a[rel="${rel}"]`)?.click();
  if (event.key === "/") { event.preventDefault(); document.getElementById("search")?.focus(); }
  else if (event.key === "[" || event.key === "k") follow("prev");
  else if (event.key === "]" || event.key === "j") follow("next");
  else if (event.key === "t") document.getElementById("theme").click();
  else if (event.key === "u") location.hash = F.link(F.place().parts.slice(0, -1).length > 1 ? F.place().parts.slice(0, -1) : []);
});

window.addEventListener("hashchange", F.go);
F.go().then(F.tick);
