"use strict";
// All runs in a table; some of them compared.
F.views.runs = async () => {
  const chosen = new Set(), place = F.place();
  const body = F.h("div", {}), compare = F.h("button", { type: "button", disabled: true, onclick: () => { location.hash = F.link(["compare", [...chosen].join(",")]); } }, "Compare chosen runs");
  const search = F.h("input", { type: "search", id: "search", value: place.query.find || "", placeholder: "name, state, owner", oninput: () => draw() });
  let told = await F.ask("runs");
  let order = "updated";
  const sorts = { run: (r) => r.name, state: (r) => r.state, step: (r) => -r.step, reward: (r) => -(r.reward ?? -Infinity), cost: (r) => -(r.cost_usd ?? -1), owner: (r) => r.owner || "~", updated: (r) => -(r.updated || 0) };
  const head = (name, kind = "") => F.h("th", { scope: "col", class: kind || null, "aria-sort": order === name ? "ascending" : null }, F.h("button", { type: "button", onclick: () => { order = name; draw(); } }, name));
  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = told.runs.filter((run) => words.every((word) => [run.name, run.state, run.owner, run.algorithm, run.model, run.word].join(" ").toLowerCase().includes(word)));
    rows.sort((a, b) => (sorts[order](a) < sorts[order](b) ? -1 : sorts[order](a) > sorts[order](b) ? 1 : 0));
    const lines = rows.map((run) => F.h("tr", { class: chosen.has(run.name) ? "chosen" : null },
      F.h("td", {}, F.h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name), onchange: (event) => { event.target.checked ? chosen.add(run.name) : chosen.delete(run.name); compare.disabled = chosen.size < 2; draw(); } })),
      F.cell(F.a(run.name, ["run", run.name]), "text"), F.cell(F.state(run.state)), F.cell(`${F.number(run.step)}${run.steps ? ` / ${F.number(run.steps)}` : ""}`, "number"),
      F.cell(F.number(run.reward ?? run.loss), "number"), F.cell(F.usd(run.cost_usd), "number"), F.cell(run.owner, "optional"), F.cell(F.ago(run.updated, told.now), "number"), F.cell(run.word, "text optional soft")));
    body.replaceChildren(rows.length ? F.table([F.h("th", { scope: "col" }, "✓"), head("run"), head("state"), head("step", "number"), head("reward", "number"), head("cost", "number"), head("owner", "optional"), head("updated", "number"), F.h("th", { scope: "col", class: "optional" }, "last word")], lines)
      : F.note(told.runs.length ? "No run matches." : `No run yet in ${told.roots.join(", ")}. Start one: flotilla submit STACK -- python -m trainer.train_ppo --config trainer/recipes/demo.yaml`));
    if (told.more) body.append(F.note(`${told.more} older runs are not shown.`));
  };
  draw();
  F.show(F.h("h1", {}, "Runs"), F.h("div", { class: "pages" }, F.h("label", {}, "Find ", search), F.told && F.told.names.length < 2 ? null : compare), body);
  F.refresh = async () => { told = await F.ask("runs"); draw(); };
};

F.views.compare = async (names) => {
  const list = names.split(",");
  const runs = await Promise.all(list.map((name) => F.ask("run", { name })));
  const keys = [...new Set(runs.flatMap((run) => run.keys))];
  const curves = await Promise.all(list.map((name) => F.ask("curves", { name, keys: keys.join(",") })));
  const legend = F.table(["run", "state", "#step", "#reward", "#best evaluation", "#cost"], runs.map((run, number) => F.h("tr", {}, F.h("td", {}, F.h("span", { class: "key", style: { background: F.colour(number) } }), F.a(run.name, ["run", run.name])), F.cell(F.state(run.state)), ...F.numbers(run.step, run.reward, Math.max(...(curves[number].curves.eval_reward?.value ?? [NaN])) || null), F.cell(F.usd(run.cost_usd), "number"))));
  const differ = await F.ask("compare", { names });
  const charts = keys.map((key) => F.chart(F.name(key), list.map((name, number) => ({ name, step: [], value: [], ...curves[number].curves[key] }))));
  F.show(F.h("h1", {}, "Compared"), legend, F.h("h2", {}, "Settings that differ"), differ.settings.length ? F.table(["setting", ...list], differ.settings.map((row) => F.h("tr", {}, F.cell(F.h("code", {}, row.name)), row.values.map((value) => F.cell(value, "text"))))) : F.note("None."), F.h("h2", {}, "Curves"), F.h("div", { class: "charts" }, charts));
};
