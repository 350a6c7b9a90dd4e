"use strict";
// Shared by all views: elements, questions to the server or to what lies in this file, words for numbers, the address.
const F = { views: {}, told: window.FLOTILLA || null, refresh: null };

// An element. Text goes in as text nodes alone, never as HTML: answers of models are strangers' words.
F.h = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...F.some(children));
  return element;
};

F.some = (children) => children.flat(9).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
F.fill = (element, ...children) => { element.replaceChildren(...F.some(children)); return element; };
F.show = (...children) => F.fill(document.getElementById("main"), children);

// --- questions

F.key = (path, query) => path + "?" + Object.entries(query).map(([name, value]) => `${name}=${value}`).join("&");

F.ask = async (path, query = {}) => {
  const given = Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false));
  if (F.told) return F.here(path, given);
  const response = await fetch(`api/${path}?${new URLSearchParams(given)}`);
  const value = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Error(value.error || response.statusText);
  return value;
};

// In one file: what was asked when it was written, and lists that are filtered here.
F.here = (path, query) => {
  const answers = F.told.answers;
  if (path === "runs") return answers.runs;
  if (path === "curves") return { ...answers[F.key("curves", { name: query.name })] };
  if (path === "episodes") return F.filtered(answers[F.key("episodes", { name: query.name })] || [], query);
  if (path === "prompts") return answers[F.key("prompts", { name: query.name })] || { rows: [], total: 0, never: 0, page: 0, size: 50 };
  const named = { name: query.name, names: query.names, id: query.id, step: query.step };
  const exact = F.key(path, Object.fromEntries(Object.entries(named).filter(([, value]) => value !== undefined)));
  if (exact in answers) return answers[exact];
  throw new Error("this file does not hold it; flotilla ui shows everything");
};

F.filtered = (rows, query) => {
  const number = (name) => (query[name] === undefined ? null : Number(query[name]));
  const inside = (row, column) => !(number(`${column}_min`) !== null && !(row[column] >= number(`${column}_min`))) && !(number(`${column}_max`) !== null && !(row[column] <= number(`${column}_max`)));
  const same = (row, column) => query[column] === undefined || String(row[column]) === String(query[column]);
  const kept = rows.filter((row) => ["reward", "tokens", "difference", "turns", "step"].every((c) => inside(row, c)) && ["step", "prompt", "finish", "engine", "source"].every((c) => same(row, c))
    && (row.kind || "") === (query.kind || "") && (!query.failed || row.failed) && (!query.whole || row.has_whole) && (!query.text || (row.start || "").toLowerCase().includes(query.text.toLowerCase())));
  const by = { newest: (a, b) => b.step - a.step || b.id - a.id, oldest: (a, b) => a.step - b.step || a.id - b.id, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward, longest: (a, b) => b.tokens - a.tokens, difference: (a, b) => b.difference - a.difference };
  const page = Number(query.page || 0);
  return { rows: kept.sort(by[query.order || "newest"]).slice(page * 50, page * 50 + 50), total: kept.length, more: false, page, size: 50 };
};

// --- words

F.number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? value.toExponential(2) : Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
};
F.usd = (value) => (value === null || value === undefined ? "–" : `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`);
F.clock = (seconds) => {
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
};
F.ago = (time, now) => {
  if (!time) return "–";
  const seconds = Math.max(0, now - time);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return `${Math.floor(seconds)} s ago`;
};
F.percent = (share) => `${(100 * share).toFixed(1)} %`;
F.name = (key) => key.replaceAll("_", " ");
F.state = (state) => F.h("span", { class: `state ${state}` }, state);
F.facts = (pairs) => F.h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => F.h("div", {}, F.h("dt", {}, name), F.h("dd", {}, value))));
F.table = (heads, rows, attributes = {}) => F.h("div", { class: "wide" }, F.h("table", attributes, F.h("thead", {}, F.h("tr", {}, heads.map((head) => (head instanceof Node ? head : F.h("th", { scope: "col", class: head.startsWith("#") ? "number" : null }, head.replace(/^#/, "")))))), F.h("tbody", {}, rows)));
F.cell = (value, kind = "") => F.h("td", { class: kind || null }, value === null || value === undefined ? "–" : value);
F.numbers = (...values) => values.map((value) => F.cell(typeof value === "number" ? F.number(value) : value, "number"));
F.note = (...words) => F.h("p", { class: "soft" }, ...words);
F.failed = (error) => F.h("p", { class: "error", role: "alert" }, error.message);

// --- the address: #/run/NAME/TAB?query

F.link = (parts, query = {}) => {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  return "#/" + parts.map(encodeURIComponent).join("/") + (given.length ? `?${new URLSearchParams(given)}` : "");
};
F.place = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
};
F.a = (text, parts, query, attributes = {}) => F.h("a", { href: F.link(parts, query), ...attributes }, text);
