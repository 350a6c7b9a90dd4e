"use strict";
// Answers: a list that is filtered, one with its tokens in colour, prompts by what they teach.
F.MOST_TOKENS = 4000; // drawn at once
F.MOST_TEXT = 50000; // characters drawn at once

F.tabs.episodes = async (run, body, head, number) => {
  if (number !== undefined) return F.episode(run, body, number);
  const { query } = F.place(), name = run.name;
  const facets = await F.ask("facets", { name });
  const input = (label, key, type = "number", more = {}) => F.h("label", {}, label, F.h("input", { type, name: key, value: query[key] || "", step: "any", ...more }));
  const select = (label, key, options) => F.h("label", {}, label, F.h("select", { name: key }, options.map(([value, text]) => F.h("option", { value, selected: (query[key] || "") === value }, text))));
  const check = (label, key) => F.h("label", { class: "check" }, F.h("input", { type: "checkbox", name: key, value: "1", checked: Boolean(query[key]) }), label);
  const go = (more = {}) => { const given = Object.fromEntries(new FormData(form)); location.hash = F.link(["run", name, "episodes"], { ...given, ...more }); };
  const form = F.h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); go(); }, onchange: () => go() },
    facets.kinds.length > 1 ? select("set", "kind", facets.kinds.map((kind) => [kind, kind || "learned from"])) : null,
    select("order", "order", [["newest", "newest first"], ["oldest", "oldest first"], ["worst", "worst reward first"], ["best", "best reward first"], ["longest", "longest first"], ["difference", "engine against policy"]]),
    input("step", "step"), input("prompt", "prompt"), input("reward from", "reward_min"), input("to", "reward_max"), input("tokens from", "tokens_min"), input("to", "tokens_max"),
    facets.finish.length ? select("end", "finish", [["", "any"], ...facets.finish.map((value) => [value, value])]) : null,
    facets.engine.length ? select("engine", "engine", [["", "any"], ...facets.engine.map((value) => [value, value])]) : null,
    facets.source.length ? select("source", "source", [["", "any"], ...facets.source.map((value) => [value, value])]) : null,
    input("beginning has", "text", "search", { id: "search" }), check("reward failed", "failed"), check("with tokens", "whole"), F.h("button", {}, "Find"), F.h("button", { type: "button", onclick: () => { location.hash = F.link(["run", name, "episodes"]); } }, "Clear"));
  const list = F.h("div", {});
  F.fill(body, form, list);
  const draw = async () => {
    const told = await F.ask("episodes", { name, ...query });
    F.fill(list, F.pages(told, (page) => F.link(["run", name, "episodes"], { ...query, page })), told.rows.length ? F.table(["#episode", "#step", "#reward", "#advantage", "#prompt", "#tokens", "#turns", "end", "#difference", "#staleness", "engine", "answer begins"], told.rows.map((row) => F.h("tr", {},
      F.cell(F.a(F.number(row.id), ["run", name, "episodes", row.id]), "number"), F.cell(F.number(row.step), "number"), F.cell(row.failed ? F.h("span", { class: "bad" }, "failed") : F.number(row.reward), "number"), ...F.numbers(row.advantage), F.cell(F.a(F.number(row.prompt), ["run", name, "episodes"], { prompt: row.prompt, order: "oldest", kind: row.kind }), "number"),
      ...F.numbers(row.tokens, row.turns), F.cell(row.finish, row.finish === "stop" ? "" : "warn"), ...F.numbers(row.difference, row.staleness), F.cell(row.engine), F.cell(row.start, "text"))))
      : F.note("No episode matches."));
  };
  await draw();
  if ((query.order || "newest") === "newest" && !query.page) F.refresh = draw;
};

F.pages = (told, link) => {
  const last = Math.max(0, Math.ceil(told.total / told.size) - 1);
  return F.h("div", { class: "pages" }, F.h("span", {}, `${told.more ? "more than " : ""}${F.number(told.total)} found`), told.page > 0 ? F.h("a", { href: link(told.page - 1), rel: "prev" }, "‹ before") : null, F.h("span", { class: "soft" }, `page ${told.page + 1} of ${last + 1}`), told.page < last ? F.h("a", { href: link(told.page + 1), rel: "next" }, "next ›") : null);
};

// --- one episode

F.COLOURED = {
  logprobs: ["log-probability, engine", (v) => [F.RED, Math.min(1, -v / 5)]],
  policy: ["log-probability, policy", (v) => [F.RED, Math.min(1, -v / 5)]],
  difference: ["engine against policy", (v) => [F.RED, Math.min(1, Math.abs(v) / 0.5)]],
  advantages: ["advantage", (v, most) => [v < 0 ? F.RED : F.GREEN, most ? Math.abs(v) / most : 0]],
  staleness: ["staleness", (v, most) => [F.BLUE, most ? v / most : 0]],
  learned: ["mask", (v) => [F.GREEN, v ? 0.6 : 0]],
};
F.RED = "208,49,45";
F.GREEN = "42,157,92";
F.BLUE = "60,120,220";

F.episode = async (run, body, number) => {
  const name = run.name, episode = await F.ask("episode", { name, id: number });
  const whole = episode.whole, at = episode.same_prompt.findIndex((other) => other.id === episode.id), same = episode.same_prompt;
  const colour = F.h("select", { id: "colour", onchange: () => F.fill(turns, draw()) }, Object.entries(F.COLOURED).map(([key, [title]]) => F.h("option", { value: key }, title)), F.h("option", { value: "" }, "nothing"));
  const draw = () => (whole ? whole.turns.map((turn) => F.turn(turn, colour.value, episode)) : [F.note("This episode was not kept whole (log.episodes says how many of a step are). Its answer begins:"), F.h("pre", {}, episode.start)]);
  const turns = F.h("div", {});
  F.fill(turns, draw());
  const step = (move) => (same[at + move] ? F.a(move < 0 ? "‹ the same prompt before" : "the same prompt next ›", ["run", name, "episodes", same[at + move].id], {}, { rel: move < 0 ? "prev" : "next" }) : null);
  F.fill(
    body,
    F.facts([["episode", F.number(episode.id)], ["step", F.a(F.number(episode.step), ["run", name], { step: episode.step })], ["reward", episode.failed ? "failed" : F.number(episode.reward)], ...Object.entries(episode.terms).map(([term, value]) => [`reward/${term}`, F.number(value)]), ["advantage", F.number(episode.advantage)], ["tokens", F.number(episode.tokens)], ["turns", F.number(episode.turns)], ["end", episode.finish], ["learned from", episode.kind ? "no, evaluation" : episode.learned ? "yes" : "no"], ["engine against policy", F.number(episode.difference)], ["staleness", F.number(episode.staleness)], ["engine", episode.engine], ["source", episode.source]]),
    F.h("div", { class: "pages" }, step(-1), step(1), F.a(`group of step ${episode.step}`, ["run", name, "episodes"], { step: episode.step, prompt: episode.prompt, kind: episode.kind })),
    F.h("h2", {}, `Prompt ${F.number(episode.prompt)}`), whole ? [F.long(whole.prompt), F.pictures(whole, episode)] : F.note("Not kept."),
    F.h("h2", {}, "Episode"), whole ? F.h("p", {}, F.h("label", {}, "Colour tokens by ", colour)) : null, turns,
    whole && Object.keys(whole.metrics || {}).length ? [F.h("h2", {}, "Counted by the environment"), F.facts(Object.entries(whole.metrics).map(([key, value]) => [key, F.number(value)]))] : null,
    same.length > 1 ? [F.h("h2", {}, "The same prompt over steps"), F.h("div", { class: "charts" }, F.samePrompt(run, same))] : null,
  );
};

F.samePrompt = (run, same) => {
  const steps = [...new Set(same.map((other) => other.step))], mean = steps.map((step) => { const some = same.filter((other) => other.step === step && other.reward !== null); return some.reduce((sum, other) => sum + other.reward, 0) / Math.max(1, some.length); });
  return F.chart("mean reward of its answers", [{ name: "reward", step: steps, value: mean }], { onStep: (step) => { location.hash = F.link(["run", run.name, "episodes", same.find((other) => other.step === step).id]); } });
};

F.long = (text) => {
  const words = typeof text === "string" ? text : JSON.stringify(text, null, 2), shown = F.h("pre", {}, words.slice(0, F.MOST_TEXT));
  let at = F.MOST_TEXT;
  const more = F.h("button", { type: "button", onclick: () => { shown.append(words.slice(at, at + F.MOST_TEXT)); at += F.MOST_TEXT; if (at >= words.length) more.remove(); } }, "More");
  return F.h("div", { class: "turn" }, shown, words.length > F.MOST_TEXT ? more : null);
};

// Small copies of what was shown there; of those that are not kept the hash.
F.pictures = (part, episode) => ((part.pictures || []).length ? F.h("div", { class: "pictures" }, part.pictures.map((one) => {
  const source = (episode.shown || {})[one.hash], name = `${one.path} (${one.hash})`;
  return source ? F.h("img", { src: source, alt: name, title: name }) : F.note(`a picture that is not kept: ${name}`);
})) : null);

F.turn = (turn, by, episode) => {
  if (!turn.pieces) return F.h("section", { class: `turn ${turn.sampled ? "policy" : "environment"}` }, F.h("h3", {}, turn.sampled ? "policy" : "environment"), F.long(turn.text || ""), F.pictures(turn, episode));
  const versions = (i) => { let version = turn.versions?.[0]?.[1] ?? null; for (const [from, of] of turn.versions || []) if (i >= from) version = of; return version; };
  const values = { logprobs: turn.logprobs, policy: turn.policy, advantages: turn.advantages, learned: turn.learned, difference: turn.policy && turn.logprobs ? turn.logprobs.map((value, i) => value - turn.policy[i]) : null, staleness: turn.versions ? turn.pieces.map((_, i) => episode.step - 1 - versions(i)) : null };
  const most = values[by] ? values[by].reduce((a, b) => Math.max(a, Math.abs(b)), 0) : 0;
  const said = F.h("div", { class: "said" });
  let at = 0;
  const add = () => {
    const until = Math.min(turn.pieces.length, at + F.MOST_TOKENS);
    for (; at < until; at++) {
      const words = Object.entries(values).filter(([, of]) => of).map(([key, of]) => `${F.COLOURED[key][0]}: ${F.number(of[at])}`).join("\n");
      const [rgb, strength] = by && values[by] ? F.COLOURED[by][1](values[by][at], most) : [F.BLUE, 0];
      said.append(F.h("span", { class: turn.learned && !turn.learned[at] ? "token off" : "token", title: words, style: strength > 0.02 ? { background: `rgba(${rgb},${(0.65 * Math.min(1, strength)).toFixed(3)})` } : null }, turn.pieces[at]));
    }
    if (at >= turn.pieces.length) more.remove();
  };
  const more = F.h("button", { type: "button", onclick: () => add() }, `More tokens`);
  const section = F.h("section", { class: "turn policy" }, F.h("h3", {}, `policy, ${F.number(turn.pieces.length)} tokens${turn.finish === "length" ? ", cut off" : ""}`), said, more);
  add();
  return section;
};

F.tabs.prompts = async (run, body) => {
  const { query } = F.place(), name = run.name, told = await F.ask("prompts", { name, ...query });
  const orders = [["no_signal", "no signal first"], ["hardest", "hardest first"], ["easiest", "easiest first"], ["most", "most asked first"]];
  F.fill(body, F.h("p", {}, `${F.number(told.never)} of ${F.number(told.total)} prompts never gave two different rewards in a group: nothing is learned from them.`),
    F.told ? "" : F.h("p", {}, F.h("label", {}, "Order ", F.h("select", { onchange: (event) => { location.hash = F.link(["run", name, "prompts"], { order: event.target.value }); } }, orders.map(([value, text]) => F.h("option", { value, selected: (query.order || "no_signal") === value }, text))))),
    F.pages(told, (page) => F.link(["run", name, "prompts"], { ...query, page })),
    F.table(["#prompt", "#groups", "#with signal", "#answers", "#mean reward", "#last step", "begins"], told.rows.map((row) => F.h("tr", {}, F.cell(F.a(F.number(row.prompt), ["run", name, "episodes"], { prompt: row.prompt, order: "oldest" }), "number"), F.cell(F.number(row.groups), "number"), F.cell(F.h("span", { class: row.signal ? "" : "bad" }, F.number(row.signal)), "number"), ...F.numbers(row.answers, row.reward, row.last), F.cell(row.start, "text")))));
};
