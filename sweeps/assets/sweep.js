"use strict";
// One sweep: its best trial, parallel coordinates over what was searched, curves of all trials, a table.
F.SVG = "http://www.w3.org/2000/svg";
F.s = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(F.SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// From the worst (grey) to the best (the link's colour): `share` is 0 to 1.
F.rank = (share) => `color-mix(in srgb, ${F.css("--link")} ${Math.round(100 * share)}%, ${F.css("--line")})`;

F.parallel = (sweep, chosen, choose) => {
  const width = 960, height = 280, top = 34, bottom = 24, axes = [...sweep.axes, { key: sweep.metric, ticks: null, log: false }];
  const of = (trial, axis) => (axis.key === sweep.metric ? trial.value : axis.ticks ? axis.ticks.indexOf(trial.point[axis.key]) : Number(trial.point[axis.key]));
  const shown = sweep.trials.filter((trial) => trial.value !== null);
  const x = (i) => 70 + (i * (width - 140)) / Math.max(1, axes.length - 1);
  const scales = axes.map((axis) => {
    const values = axis.ticks ? [0, axis.ticks.length - 1] : axis.ends || shown.map((trial) => trial.value);
    const by = axis.log ? Math.log : (value) => value;
    const low = by(Math.min(...values)), high = by(Math.max(...values));
    return { low: Math.min(...values), high: Math.max(...values), y: (value) => height - bottom - (high === low ? 0.5 : (by(value) - low) / (high - low)) * (height - top - bottom) };
  });
  const lines = shown.slice().sort((a, b) => a.share - b.share).map((trial) => {
    const path = axes.map((axis, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${scales[i].y(of(trial, axis)).toFixed(1)}`).join("");
    const line = F.s("path", { d: path, fill: "none", stroke: F.rank(trial.share), "stroke-width": trial.name === chosen ? 4 : trial.best ? 3 : 1.4, tabindex: 0, role: "button", "aria-label": trial.name });
    line.append(F.s("title", {}, `${trial.name}: ${F.number(trial.value)}`));
    line.addEventListener("click", () => choose(trial.name));
    return line;
  });
  const marks = axes.flatMap((axis, i) => {
    const text = (value, y, more = {}) => { const t = F.s("text", { x: x(i), y, "text-anchor": "middle", fill: F.css("--ink"), "font-size": 12, ...more }); t.textContent = value; return t; };
    const ticks = axis.ticks ? axis.ticks.map((tick, at) => text(tick, scales[i].y(at) - 4, { "font-size": 11 })) : [text(F.number(scales[i].high, 3), top - 5, { "font-size": 11 }), text(F.number(scales[i].low, 3), height - 8, { "font-size": 11 })];
    return [F.s("line", { x1: x(i), x2: x(i), y1: top, y2: height - bottom, stroke: F.css("--soft") }), text(axis.key + (axis.log ? " (log)" : ""), 14, { "font-weight": 600 }), ...ticks];
  });
  const svg = F.s("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `parallel coordinates of ${shown.length} trials` });
  svg.append(...lines, ...marks);
  return F.h("div", { class: "card wide" }, svg);
};

F.views.runs = async () => {
  const sweep = F.told.sweep, body = F.h("div", {});
  let chosen = null, order = "place";
  const sorts = { place: (t) => t.place, trial: (t) => t.number, state: (t) => t.state, step: (t) => -t.step, value: (t) => t.place, cost: (t) => -(t.cost ?? t.seconds) };
  const draw = () => {
    F.clearPlots();
    const pick = (name) => { chosen = chosen === name ? null : name; draw(); };
    const head = (name, key, kind) => F.h("th", { scope: "col", class: kind || null }, F.h("button", { type: "button", onclick: () => { order = key; draw(); } }, name));
    const rows = sweep.trials.slice().sort((a, b) => (sorts[order](a) < sorts[order](b) ? -1 : 1)).map((trial) => F.h("tr", { class: trial.name === chosen ? "chosen" : null, onclick: () => pick(trial.name) },
      F.cell(trial.name, "text"), F.cell(trial.word), ...sweep.axes.map((axis) => F.cell(F.h("code", {}, trial.point[axis.key]), "number")),
      ...F.numbers(trial.value, trial.step), F.cell(F.clock(trial.seconds), "number"), F.cell(F.usd(trial.cost), "number"), F.cell(trial.error, "text soft")));
    const few = chosen ? sweep.trials.filter((trial) => trial.name === chosen || trial.best) : sweep.trials.slice().sort((a, b) => a.place - b.place);
    const charts = sweep.curves.map((key) => F.chart(F.name(key), few.map((trial) => ({ name: trial.name, step: [], value: [], ...trial.curves[key] })), { height: 240 }));
    F.fill(body, F.h("h2", {}, "What was searched"), F.parallel(sweep, chosen, pick), F.h("h2", {}, chosen ? `Curves of ${chosen} and the best` : "Curves, the best first"), F.h("div", { class: "charts" }, charts),
      F.h("h2", {}, "Trials"), F.table([head("trial", "trial"), head("state", "state"), ...sweep.axes.map((axis) => F.h("th", { scope: "col", class: "number" }, axis.key)), head(sweep.metric, "value", "number"), head("step", "step", "number"), head("time", "cost", "number"), head("cost", "cost", "number"), "why"], rows));
  };
  const best = sweep.trials.find((trial) => trial.best);
  F.show(F.h("h1", {}, `Sweep ${sweep.name}`), F.facts([["trials", `${sweep.trials.length} of ${sweep.wanted}`], ["search", sweep.search], ["stop", sweep.stop], ["compared at steps", sweep.rungs.join(", ")], ["steps trained", F.number(sweep.steps)], ["time of all trials", F.clock(sweep.seconds)], ["cost", F.usd(sweep.cost)]]),
    best ? F.h("div", { class: "card" }, F.h("p", {}, "Best: ", F.h("b", {}, best.name), ` with ${sweep.metric} ${F.number(best.value)} at step ${best.step}`), F.h("pre", {}, sweep.axes.map((axis) => `${axis.key}=${best.point[axis.key]}`).join("\n"))) : F.note("No trial has a value yet."), body);
  draw();
};
