"use strict";
// A traced step: a lane for the driver, each rank, each engine, and in words where the time went.
F.SPANS = ["#8fb8f0", "#f2b880", "#9fd6a8", "#d2b3f2", "#f2a6b4", "#8fd6d9", "#e0cf85", "#b9b3e6", "#c9d1db"];
F.IDLE = /idle|wait/;

F.tabs.timeline = async (run, body) => {
  const { query } = F.place(), name = run.name, told = await F.ask("lanes", { name, step: query.step });
  if (!told.steps.length) return F.fill(body, F.note("No step of this run was traced. Set log.trace.steps, such as log.trace.steps=20..22: it can be changed when a run is resumed."), run.words.length ? F.h("ul", { class: "words" }, run.words.map((word) => F.h("li", {}, word))) : null);
  const kinds = [...new Set(told.lanes.flatMap((lane) => lane.spans.map(([kind]) => kind)))].filter((kind) => !F.IDLE.test(kind)), paint = (kind) => (F.IDLE.test(kind) ? "#c9d1db" : F.SPANS[kinds.indexOf(kind) % 8]);
  const lanes = told.lanes.flatMap((lane) => [F.h("div", {}, lane.name, lane.node ? F.h("span", { class: "soft small" }, ` ${lane.node}`) : null), F.h("div", { class: "lane", role: "img", "aria-label": F.laneWords(lane, told.seconds) }, lane.spans.filter(([, from, to]) => to > from).map(([kind, from, to, more]) => F.h("span", { title: `${kind}: ${F.number(from, 3)} s to ${F.number(to, 3)} s, ${F.number(to - from, 3)} s${more ? `\n${Object.entries(more).map(([key, value]) => `${key} ${value}`).join("\n")}` : ""}`, style: { left: `${(100 * from) / told.seconds}%`, width: `${(100 * (to - from)) / told.seconds}%`, background: paint(kind) } }, kind)))]);
  F.fill(
    body,
    F.h("p", {}, F.h("label", {}, "Step ", F.h("select", { onchange: (event) => { location.hash = F.link(["run", name, "timeline"], { step: event.target.value }); } }, told.steps.map((step) => F.h("option", { value: step, selected: step === told.step }, step)))), ` ${F.number(told.seconds, 3)} s. `, F.told ? null : F.h("a", { href: `trace/${encodeURIComponent(name)}?steps=${told.step}`, download: `${name}-step-${told.step}.json.gz` }, "Download for Perfetto")),
    F.h("section", { class: "card" }, F.h("h2", {}, "Where the time went"), told.words.length ? F.h("ul", { class: "words" }, told.words.map((word) => F.h("li", {}, word))) : F.note("Nothing stands out: no part waits long for another.")),
    F.h("div", { class: "lanes" }, lanes),
    F.h("p", { class: "small" }, kinds.map((kind) => [F.h("span", { class: "key", style: { background: paint(kind) } }), `${kind}  `]), F.h("span", { class: "key", style: { background: "#c9d1db" } }), "waiting"),
  );
};

F.laneWords = (lane, seconds) => {
  const sums = {};
  for (const [kind, from, to] of lane.spans) sums[kind] = (sums[kind] || 0) + to - from;
  return `${lane.name}: ${Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([kind, spent]) => `${kind} ${F.percent(spent / seconds)}`).join(", ")}`;
};
