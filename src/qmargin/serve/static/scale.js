// The score on a scale, with the scores of the evaluation behind it.

import { drawn, signed } from "./dom.js";

const FLOOR = 205; // of the histograms
const APART = 150; // least distance of the two labels

// Draws into `svg`; `at` is the operating point and `score` a number or null. Returns the caption.
export function drawScale(svg, { thresholds, at, score, isAudio }) {
  const histogram = thresholds && thresholds.histogram;
  const values = histogram ? histogram.edges : [-1, 1];
  const marks = [at && at.threshold, score].filter((v) => typeof v === "number");
  const low = Math.min(values[0], ...marks);
  const high = Math.max(values[values.length - 1], ...marks);
  const x = (value) => 20 + (640 * (value - low)) / (high - low);
  svg.replaceChildren();
  if (histogram) {
    const noun = isAudio ? ["speaker", "speakers"] : ["person", "people"];
    const labels = { impostor: `two ${noun[1]}`, genuine: `one ${noun[0]}` };
    const places = labelPlaces(histogram, x);
    Object.keys(labels).forEach((kind) => {
      const counts = histogram[kind];
      const most = Math.max(...counts, 1);
      const steps = counts.map((count, i) => {
        const y = (FLOOR - (150 * count) / most).toFixed(1);
        return `${x(histogram.edges[i]).toFixed(1)} ${y}L${x(histogram.edges[i + 1]).toFixed(1)} ${y}`;
      });
      const [first, last] = [histogram.edges[0], histogram.edges[counts.length]].map((e) => x(e).toFixed(1));
      svg.append(drawn("path", { class: `area ${kind}`, d: `M${first} ${FLOOR}L${steps.join("L")}L${last} ${FLOOR}Z` }));
      svg.append(drawn("text", { class: `${kind}-label`, x: places[kind].toFixed(1), y: 46, "text-anchor": "middle" }, labels[kind]));
    });
  }
  svg.append(drawn("line", { class: "frame", x1: 20, x2: 660, y1: FLOOR, y2: FLOOR }));
  const step = high - low > 1.1 ? 0.5 : 0.25;
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    svg.append(drawn("text", { x: x(value), y: 224, "text-anchor": "middle" }, signed(value, 2)));
  }
  if (at && at.threshold !== null) {
    const place = x(at.threshold);
    svg.append(drawn("line", { class: "threshold-line", x1: place, x2: place, y1: 52, y2: FLOOR }));
    svg.append(drawn("text", { class: "threshold-label", x: Math.min(Math.max(place, 80), 580), y: 18, "text-anchor": "middle" }, `threshold ${signed(at.threshold, 3)}`));
  }
  if (score !== null) {
    const place = x(score);
    svg.append(drawn("line", { class: "score-line", x1: place, x2: place, y1: 60, y2: FLOOR }));
    svg.append(drawn("text", { class: "score-label", x: Math.min(Math.max(place, 60), 600), y: 246, "text-anchor": "middle" }, `score ${signed(score, 3)}`));
  }
  if (!thresholds) return "";
  if (!histogram) return "The model has no distribution of scores; export its result again to add one.";
  const [genuine, impostors] = [thresholds.num_genuine, thresholds.num_impostors].map((n) => n.toLocaleString("en"));
  return `Scores of the evaluation on ${thresholds.protocol}: ${genuine} genuine and ${impostors} impostor pairs, each kind drawn to the same height.`;
}

// Where the labels go: at the peaks, far enough from each other and from the edges.
function labelPlaces(histogram, x) {
  const peak = (counts) => x(histogram.edges[counts.indexOf(Math.max(...counts))]);
  const [impostor, genuine] = [peak(histogram.impostor), peak(histogram.genuine)];
  const within = (value) => Math.min(Math.max(value, 70), 600);
  const side = impostor <= genuine ? 1 : -1;
  if (Math.abs(within(genuine) - within(impostor)) >= APART) return { impostor: within(impostor), genuine: within(genuine) };
  const middle = Math.min(Math.max((impostor + genuine) / 2, 70 + APART / 2), 600 - APART / 2);
  return { impostor: middle - (side * APART) / 2, genuine: middle + (side * APART) / 2 };
}
