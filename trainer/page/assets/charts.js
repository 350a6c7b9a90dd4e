"use strict";
// Curves over steps: means strong, least and largest as a band, what happened as vertical lines. Drawn by uPlot (uplot-licence.txt).
F.COLOURS = { light: ["#0b57b0", "#b3500a", "#146c2e", "#8a2be2", "#a3123a", "#00696f", "#6b5200", "#5c4bb5"], dark: ["#7db7ff", "#ffb074", "#6fd08c", "#cfa7ff", "#ff9db2", "#5fd4da", "#e3c35a", "#b3a8ff"] };
F.MARKS = { start: "#888888", rollback: "#d08000", fault: "#d0312d", evaluation: "#2a9d5c" };
F.theme = () => document.documentElement.dataset.theme || "light";
F.colour = (place) => F.COLOURS[F.theme()][place % 8];
F.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
F.shared = { key: "steps", plots: [] };

// Curves of several runs over one axis of steps. `curves`: [{name, step, value, low, high, broken}].
F.chart = (title, curves, { marks = [], onStep = null, height = 180, points = false } = {}) => {
  const steps = [...new Set(curves.flatMap((curve) => curve.step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const laid = (curve, values) => { const row = new Array(steps.length).fill(null); curve.step.forEach((step, index) => { row[place.get(step)] = values[index]; }); return row; };
  const data = [steps], series = [{}], bands = [];
  curves.forEach((curve, number) => {
    const colour = F.colour(number), few = points || curve.step.length <= 1 || curve.step.length < steps.length / 3;
    if (curve.low) {
      data.push(laid(curve, curve.high), laid(curve, curve.low));
      series.push({ stroke: "transparent", spanGaps: true, points: { show: false } }, { stroke: "transparent", spanGaps: true, points: { show: false } });
      bands.push({ series: [series.length - 2, series.length - 1], fill: colour + "33" });
    }
    data.push(laid(curve, curve.value));
    series.push({ label: curve.name, stroke: colour, width: 1.6, spanGaps: true, paths: points ? () => null : undefined, points: { show: few, size: 6, fill: colour } });
  });
  const shown = F.h("span", { class: "soft" }, F.lastOf(curves));
  const box = F.h("div", {});
  const count = curves.reduce((sum, curve) => sum + curve.step.length, 0);
  const figure = F.h("section", { class: "chart", "aria-label": `${title}: ${count} points; last ${F.lastOf(curves)}` }, F.h("h3", {}, F.h("span", {}, title), shown), F.brokenOf(curves), box);
  const axis = { stroke: F.css("--soft"), grid: { stroke: F.css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const draw = () => {
    const width = Math.max(200, box.clientWidth || 320);
    const plot = new uPlot({
      width, height, series, bands,
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 26, values: (_, values) => values.map((v) => (Number.isInteger(v) ? F.number(v) : "")) }, { ...axis, size: 52, values: (_, values) => values.map((v) => F.number(v, 3)) }],
      cursor: { sync: { key: F.shared.key }, drag: { x: true, y: false }, points: { size: 7 } },
      hooks: {
        setCursor: [(u) => { const at = u.cursor.idx; shown.textContent = at === null || at === undefined ? F.lastOf(curves) : `step ${steps[at]}: ${curves.map((curve) => { const i = curve.step.indexOf(steps[at]); return i < 0 ? "–" : F.number(curve.value[i]); }).join("  ")}`; }],
        draw: [(u) => F.drawMarks(u, marks.concat(curves.flatMap((curve) => (curve.broken || []).map((step) => ({ step, kind: "fault" })))))],
        ready: [(u) => onStep && u.over.addEventListener("click", () => { const at = u.cursor.idx; if (at !== null && at !== undefined && !(u.select.width > 3)) onStep(steps[at]); })],
      },
    }, data, box);
    F.shared.plots.push({ plot, box, height });
  };
  if (steps.length) requestAnimationFrame(draw);
  return figure;
};

F.brokenOf = (curves) => {
  const steps = curves.flatMap((curve) => curve.broken || []);
  return steps.length ? F.h("p", { class: "bad small" }, `not finite at step ${steps[0]}${steps.length > 1 ? ` and ${steps.length - 1} more` : ""}`) : null;
};

F.lastOf = (curves) => curves.map((curve) => F.number(curve.value?.at(-1))).join("  ");

F.drawMarks = (u, marks) => {
  for (const mark of marks) {
    if (mark.step === null || mark.step === undefined) continue;
    const x = Math.round(u.valToPos(mark.step, "x", true));
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.save();
    u.ctx.strokeStyle = F.MARKS[mark.kind] || "#888888";
    u.ctx.setLineDash(mark.kind === "start" ? [2, 3] : []);
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
    u.ctx.restore();
  }
};

F.clearPlots = () => { for (const { plot } of F.shared.plots) plot.destroy(); F.shared.plots = []; };
window.addEventListener("resize", () => { for (const { plot, box, height } of F.shared.plots) plot.setSize({ width: Math.max(200, box.clientWidth), height }); });
