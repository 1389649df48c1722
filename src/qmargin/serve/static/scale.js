// The score on a scale, with the scores of the evaluation behind it.

import { drawn, signed } from "./dom.js";

const FLOOR = 205; // of the histograms
const WIDTH = 680;
const half = (text) => text.getComputedTextLength() / 2 + 4; // phones have larger letters
const within = (value, margin) => Math.min(Math.max(value, margin), WIDTH - margin);

// Draws into `svg`; `at` is the operating point and `score` a number or null. Returns the caption.
export function drawScale(svg, { thresholds, at, score, nouns }) {
  const histogram = thresholds && thresholds.histogram;
  const values = histogram ? histogram.edges : [-1, 1];
  const marks = [at && at.threshold, score].filter((v) => typeof v === "number");
  const low = Math.min(values[0], ...marks);
  const high = Math.max(values[values.length - 1], ...marks);
  const x = (value) => 20 + (640 * (value - low)) / (high - low);
  const label = (kind, y, text) => {
    const made = drawn("text", { class: `${kind}-label`, y, "text-anchor": "middle" }, text);
    svg.append(made);
    return made;
  };
  const top = histogram ? 0 : 130; // low without anything behind the score
  svg.setAttribute("viewBox", `0 ${top} ${WIDTH} ${256 - top}`);
  svg.replaceChildren();
  if (histogram) {
    ["impostor", "genuine"].forEach((kind) => {
      const counts = histogram[kind];
      const most = Math.max(...counts, 1);
      const steps = counts.map((count, i) => {
        const y = (FLOOR - (150 * count) / most).toFixed(1);
        return `${x(histogram.edges[i]).toFixed(1)} ${y}L${x(histogram.edges[i + 1]).toFixed(1)} ${y}`;
      });
      const [first, last] = [histogram.edges[0], histogram.edges[counts.length]].map((e) => x(e).toFixed(1));
      svg.append(drawn("path", { class: `area ${kind}`, d: `M${first} ${FLOOR}L${steps.join("L")}L${last} ${FLOOR}Z` }));
    });
  }
  svg.append(drawn("line", { class: "frame", x1: 20, x2: 660, y1: FLOOR, y2: FLOOR }));
  const step = high - low > 1.1 ? 0.5 : 0.25;
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
    svg.append(drawn("text", { x: x(value), y: 224, "text-anchor": "middle" }, signed(value, 2)));
  }
  if (at && at.threshold !== null) {
    const place = x(at.threshold);
    svg.append(drawn("line", { class: "threshold-line", x1: place, x2: place, y1: top + 24, y2: FLOOR }));
    const text = label("threshold", top + 18, `threshold ${signed(at.threshold, 3)}`);
    text.setAttribute("x", within(place, half(text)));
  }
  if (score !== null) {
    const place = x(score);
    svg.append(drawn("line", { class: "score-line", x1: place, x2: place, y1: Math.max(60, top + 24), y2: FLOOR }));
    const text = label("score", 248, `score ${signed(score, 3)}`);
    text.setAttribute("x", within(place, half(text)));
  }
  if (histogram) {
    const texts = { impostor: label("impostor", 46, `different ${nouns.many}`), genuine: label("genuine", 46, `same ${nouns.one}`) };
    placeLabels(histogram, x, texts);
  }
  if (!thresholds) return "";
  if (!histogram) return "The model has no distribution of scores; export its result again to add one.";
  const [genuine, impostors] = [thresholds.num_genuine, thresholds.num_impostors].map((n) => n.toLocaleString("en"));
  return `The score is the cosine of the two embeddings, from −1 to 1. Behind it are the scores of the evaluation on ${thresholds.protocol}: ${genuine} pairs of the same ${nouns.one} and ${impostors} of different ${nouns.many}, each kind drawn to the same height.`;
}

// Puts the labels of the two kinds at their peaks, or beside each other where these are close.
function placeLabels(histogram, x, texts) {
  const peaks = Object.keys(texts).map((kind) => {
    const counts = histogram[kind];
    return { text: texts[kind], at: within(x(histogram.edges[counts.indexOf(Math.max(...counts))]), half(texts[kind])) };
  });
  const [left, right] = peaks[0].at <= peaks[1].at ? peaks : [peaks[1], peaks[0]];
  const apart = half(left.text) + half(right.text);
  if (right.at - left.at < apart) {
    const middle = within((left.at + right.at) / 2, apart);
    left.at = middle - apart + half(left.text);
    right.at = middle + apart - half(right.text);
  }
  peaks.forEach(({ text, at }) => text.setAttribute("x", at));
}
