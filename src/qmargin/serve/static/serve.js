// The page of `qmargin serve`: two inputs are compared, one is searched in the gallery.

import { capturePicture, captureSound, deviceProblem } from "./capture.js";
import { counted, element, drawn, signed } from "./dom.js";
import { drawScale } from "./scale.js";

const byId = (id) => document.getElementById(id);
const slots = {};
let model = null;
let verified = null; // the last answer of /v1/verify
let token = new URLSearchParams(window.location.hash.slice(1)).get("token") || "";
if (token) window.history.replaceState(null, "", "/"); // out of the address bar

// -- small helpers ------------------------------------------------------------------------------

function show(id, text) {
  const place = byId(id);
  place.textContent = text;
  place.hidden = !text;
}

// A text whose commands are between backticks.
function coded(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", { textContent: part }) : part));
}

async function ask(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const content = body && JSON.stringify(body);
  if (content && content.length > model.limits.upload_bytes) {
    const most = model.limits.upload_bytes / (1 << 20);
    throw new Error(`The files make a request of ${(content.length / (1 << 20)).toFixed(1)} MiB; at most ${most} MiB are taken. Send fewer at once`);
  }
  let answer;
  try {
    answer = await fetch(`/v1/${path}`, { method, headers, body: content });
  } catch (error) {
    throw new Error("The server does not answer; look at the terminal in which it was started");
  }
  if (answer.status === 401) byId("token-form").hidden = false;
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    throw new Error(found.error ? found.error.message : `The server answered ${answer.status}; try again`);
  }
  return found;
}

async function encoded(blob) {
  if (blob.size * 1.4 > model.limits.upload_bytes) {
    const most = Math.floor(model.limits.upload_bytes / 1.4 / (1 << 20));
    throw new Error(`The file has ${(blob.size / (1 << 20)).toFixed(1)} MiB; at most ${most} MiB are taken; choose a smaller one`);
  }
  const bytes = new Uint8Array(await blob.arrayBuffer());
  const parts = [];
  for (let i = 0; i < bytes.length; i += 32768) {
    parts.push(String.fromCharCode(...bytes.subarray(i, i + 32768)));
  }
  return window.btoa(parts.join(""));
}

function reported(id, work, isCurrent = () => true) {
  show(id, "");
  return work().catch((error) => {
    if (isCurrent()) show(id, error.message);
  });
}

// -- theme --------------------------------------------------------------------------------------

const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function stored(value) {
  try {
    if (value !== undefined) window.localStorage.setItem("qmargin-theme", value);
    return window.localStorage.getItem("qmargin-theme");
  } catch (error) {
    return null;
  }
}

function showTheme(name) {
  root.dataset.theme = name;
  const other = name === "dark" ? "Light" : "Dark";
  byId("theme").textContent = other;
  byId("theme").setAttribute("aria-label", `${other} theme`);
}

const chosenTheme = stored();
showTheme(["dark", "light"].includes(chosenTheme) ? chosenTheme : dark.matches ? "dark" : "light");
dark.addEventListener("change", () => {
  if (stored() === null) showTheme(dark.matches ? "dark" : "light");
});
byId("theme").addEventListener("click", () => {
  const name = root.dataset.theme === "dark" ? "light" : "dark";
  stored(name);
  showTheme(name);
});

// -- inputs -------------------------------------------------------------------------------------

const isAudio = () => model.modality === "audio";
const noun = () => (isAudio() ? "recording" : "picture");
const nouns = () => (isAudio() ? { one: "speaker", many: "speakers" } : { one: "person", many: "people" });

// `called` stands in messages, where the server can only count files.
function makeSlot(place, title, called, changed) {
  const view = element("div", { className: "view" });
  const name = element("p", { className: "title", textContent: title });
  const file = element("input", { type: "file" });
  const live = element("button", { type: "button" });
  const device = () => (isAudio() ? "Microphone" : "Camera");
  const choose = element("label", {}, "Choose a file", file);
  place.append(name, view, element("div", { className: "buttons" }, choose, live));
  const slot = { called, data: null, made: null }; // made: what is known of a generated file

  slot.ready = () => {
    file.accept = isAudio() ? "audio/*" : "image/*";
    file.setAttribute("aria-label", `${title}: choose a ${noun()}`);
    live.textContent = device();
    view.replaceChildren(`Drop a ${noun()} here`);
  };
  slot.set = (data, label, made = null) => {
    if (slot.stop) slot.stop(); // a file is chosen while the camera runs
    Object.assign(slot, { data, made });
    name.textContent = `${title}: ${label}`;
    place.classList.add("filled");
    view.replaceChildren(`Reading the ${noun()}`);
  };
  slot.fill = (...given) => {
    slot.set(...given);
    return changed();
  };
  slot.show = (shown) => view.replaceChildren(...pictured(shown, title));
  slot.fail = () => view.replaceChildren(`This ${noun()} cannot be used; see the message`);
  slot.take = (blob, label) =>
    encoded(blob).then((data) => slot.fill(data, label), (error) => slot.problem(error.message));
  slot.problem = (text) => view.replaceChildren(text);

  file.addEventListener("change", () => {
    if (file.files.length) slot.take(file.files[0], file.files[0].name);
    file.value = "";
  });
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    place.classList.add("over");
  });
  place.addEventListener("dragleave", () => place.classList.remove("over"));
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    place.classList.remove("over");
    const dropped = event.dataTransfer.files[0];
    if (dropped) slot.take(dropped, dropped.name);
  });
  live.addEventListener("click", () => {
    if (slot.stop) {
      slot.stop();
      return;
    }
    const capture = isAudio() ? captureSound : capturePicture;
    const [before, { data }] = [[...view.childNodes], slot];
    const other = new Promise((stop) => { slot.stop = () => stop("other"); });
    live.textContent = "Cancel";
    capture(view, other)
      .then((blob) => {
        if (blob) return slot.take(blob, device().toLowerCase());
        if (slot.data === data) view.replaceChildren(...before);
        return null;
      })
      .catch((error) => view.replaceChildren(deviceProblem(error), ...(data ? before : [])))
      .finally(() => {
        live.textContent = device();
        slot.stop = null;
        if (document.activeElement === document.body) live.focus({ preventScroll: true });
      });
  });
  return slot;
}

function pictured(shown, title) {
  if (shown.image) {
    const source = `data:image/png;base64,${shown.image}`;
    const face = element("img", { className: "face", src: source, alt: `${title} as the model sees it` });
    return [face, `As the model sees it, ${model.input_shape[2]} × ${model.input_shape[1]} pixels`];
  }
  const wave = drawn("svg", { viewBox: `0 -1 ${shown.peaks.length} 2`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: waveform` });
  const most = Math.max(...shown.peaks.map(([low, high]) => Math.max(-low, high)), 1e-6);
  const tops = shown.peaks.map(([, high], x) => `${x} ${(-high / most).toFixed(3)}`);
  const bottoms = shown.peaks.map(([low], x) => `${x} ${(-low / most).toFixed(3)}`).reverse();
  wave.append(drawn("path", { d: `M${[...tops, ...bottoms].join("L")}Z` }));
  const bank = element("img", { className: "bank", src: `data:image/png;base64,${shown.filter_bank}`, alt: `${title}: log-mel filter bank` });
  return [wave, bank, `As the model sees it: waveform and filter bank, ${shown.seconds.toFixed(1)} s`];
}

// -- verify -------------------------------------------------------------------------------------

let turns = 0; // comparisons that were begun
const points = () => (model.thresholds ? model.thresholds.points : []);
const point = () => points()[Number(byId("far").value)];

function verify() {
  const { a, b } = slots;
  const turn = (turns += 1);
  const isCurrent = () => turn === turns; // no other file came meanwhile
  verified = null;
  if (!a.data || !b.data) {
    const filled = a.data ? a : b;
    showOutcome();
    return reported("verify-problem", () => preview(filled), isCurrent);
  }
  return reported("verify-problem", async () => {
    try {
      const answer = await ask("POST", "verify", { pairs: [[a.data, b.data]], show: true });
      if (!isCurrent()) return;
      verified = answer.results[0];
      [a, b].forEach((slot, side) => slot.show(verified.shown[side]));
    } catch (error) {
      await Promise.all([a, b].map((slot) => preview(slot).catch(() => slot.fail())));
      throw error;
    } finally {
      showOutcome();
    }
  }, isCurrent);
}

async function preview(slot) {
  const { data } = slot;
  try {
    const answer = await ask("POST", "embed", { inputs: [data], show: true });
    if (slot.data === data) slot.show(answer.results[0].shown);
  } catch (error) {
    if (slot.data === data) slot.fail();
    throw new Error(error.message.replace("input 1", slot.called));
  }
}

function showOutcome() {
  const at = point();
  byId("outcome").hidden = verified === null;
  show("truth", "");
  if (verified !== null) {
    const score = signed(verified.score, 4);
    const decision = byId("decision");
    decision.className = "headline";
    if (at === undefined) {
      decision.textContent = `Score ${score}`;
      show("sentence", "A score is a cosine between −1 and 1. A decision needs a threshold.");
    } else {
      const isSame = at.threshold !== null && verified.score >= at.threshold;
      decision.classList.add(isSame ? "yes" : "no");
      decision.textContent = isSame ? `The same ${nouns().one}` : `Different ${nouns().many}`;
      const limit = at.threshold === null ? "no score is enough" : signed(at.threshold, 4);
      const relation = isSame ? "reaches" : "is below";
      show("sentence", `The score ${score} ${relation} the threshold ${limit}. ${at.words}.`);
      const { made } = slots.a;
      if (made !== null && made === slots.b.made) {
        const truth = made.same ? `the same ${nouns().one}` : `different ${nouns().many}`;
        show("truth", `These ${noun()}s were generated as ${truth}, so the decision is ${isSame === made.same ? "right" : "wrong"}.`);
      }
    }
  }
  const { thresholds } = model;
  const score = verified && verified.score;
  byId("scale").hidden = !thresholds && score === null;
  const svg = byId("scale").querySelector("svg");
  byId("scale-text").textContent = drawScale(svg, { thresholds, at, score, nouns: nouns() });
}

const rough = (note) => (note ? `This rate is rough: ${note}.` : "");

function showRate() {
  const at = point();
  if (!at) return;
  byId("far-text").textContent = at.far_text;
  byId("far").setAttribute("aria-valuetext", `FAR ${at.far_text}`);
  byId("far-note").textContent = rough(at.note);
  showOutcome();
}

byId("far").addEventListener("input", showRate);

// -- identify -----------------------------------------------------------------------------------

const MOST_LISTED = 500; // names
let isEmpty = true; // the gallery
const fpir = () => model.fpirs[Number(byId("fpir").value)];

function showGallery(gallery) {
  isEmpty = gallery.num_samples === 0;
  const names = Object.entries(gallery.names);
  byId("gallery-size").textContent = `${counted(names.length, "name", "names")}, ${counted(gallery.num_samples, "sample", "samples")}${names.length > MOST_LISTED ? `; the first ${MOST_LISTED} are listed` : ""}`;
  byId("gallery-note").textContent = gallery.is_stored
    ? "Embeddings are kept in the file that the server was started with."
    : "Embeddings are kept in memory, and are gone when the server ends.";
  byId("gallery").replaceChildren(...names.slice(0, MOST_LISTED).map(([name, count]) => {
    const forget = element("button", { type: "button", textContent: "Forget" });
    forget.setAttribute("aria-label", `Forget ${name}`);
    forget.addEventListener("click", () => reported("gallery-problem", async () => {
      showGallery(await ask("DELETE", `gallery/${encodeURIComponent(name)}`));
      await identify();
    }));
    const label = element("span", {}, element("bdi", { textContent: name }), ` (${count})`);
    return element("li", {}, label, forget);
  }));
}

byId("enrol").addEventListener("submit", (event) => {
  event.preventDefault();
  const files = [...byId("enrol-files").files];
  reported("gallery-problem", async () => {
    const inputs = await Promise.all(files.map(encoded));
    const name = (message) => message.replace(/\binput (\d+)\b/, (text, i) => files[i - 1].name);
    const answer = await ask("POST", "gallery", { name: byId("enrol-name").value, inputs })
      .catch((error) => { throw new Error(name(error.message)); });
    showGallery(answer);
    event.target.reset();
    await identify();
    const failed = answer.results.flatMap(({ error }) => (error ? [name(error.message)] : []));
    if (failed.length) throw new Error(failed.join("; "));
  });
});

let searches = 0;

function identify() {
  byId("found").textContent = "";
  ["found-words", "found-truth"].forEach((id) => show(id, ""));
  byId("candidates").replaceChildren();
  if (!slots.probe.data) return Promise.resolve();
  const turn = (searches += 1);
  const isCurrent = () => turn === searches; // a later question has a later answer
  return reported("identify-problem", async () => {
    await preview(slots.probe);
    if (!isCurrent()) return;
    if (isEmpty) throw new Error("The gallery is empty; enrol a person, or start the server with --gallery DIR");
    const answer = await ask("POST", "identify", { inputs: [slots.probe.data], fpir: fpir() });
    if (!isCurrent()) return;
    const { candidates } = answer.results[0];
    const best = candidates[0];
    const found = byId("found");
    found.replaceChildren();
    const limit = answer.threshold === null ? "no score is enough" : signed(answer.threshold, 4);
    const relation = best.is_accepted ? "reaches" : "is below";
    show("found-words", best.is_accepted === null ? "" : `The best score ${signed(best.score, 4)} ${relation} the threshold ${limit} of one comparison. ${answer.words}.`);
    show("found-truth", slots.probe.made || "");
    byId("fpir-note").textContent = rough(answer.note);
    if (best.is_accepted === null) {
      found.append("No decision without a threshold");
    } else if (best.is_accepted) {
      found.append(element("bdi", { textContent: best.name }));
    } else {
      found.append("No match in the gallery");
    }
    byId("candidates").replaceChildren(...candidates.map((one) => {
      const meter = element("meter", { min: 0, max: 1, value: Math.max(0, one.score) });
      meter.setAttribute("aria-label", `Score of ${one.name}`);
      const number = element("span", { className: "number", textContent: signed(one.score, 4) });
      const item = element("li", {}, element("bdi", { textContent: one.name }), meter, number);
      item.classList.toggle("accepted", one.is_accepted === true);
      return item;
    }));
  }, isCurrent);
}

function showFpir() {
  const text = `${Number((100 * fpir()).toPrecision(3))} %`;
  byId("fpir-text").textContent = text;
  byId("fpir").setAttribute("aria-valuetext", `FPIR ${text}`);
}

byId("fpir").addEventListener("input", showFpir);
byId("fpir").addEventListener("change", identify);

// -- generated files to try ---------------------------------------------------------------------

const NUM_MADE = 10; // identities that are enrolled
const madeName = (number) => `Generated ${String(number + 1).padStart(2, "0")}`;
const random = (most) => Math.floor(Math.random() * most);

async function generated(number, same) {
  return (await ask("POST", "generate", { same, number })).files;
}

async function tryPair(same) {
  const [made, files] = [{ same }, await generated(random(1e9), same)];
  slots.a.set(files[0], "generated", made);
  await slots.b.fill(files[1], "generated", made);
}

async function enrolMade() {
  for (let number = 0; number < NUM_MADE; number += 1) {
    const [file] = await generated(number, true);
    showGallery(await ask("POST", "gallery", { name: madeName(number), inputs: [file] }));
  }
  await identify();
}

async function searchMade(number, who) {
  const [, file] = await generated(number, true);
  await slots.probe.fill(file, "generated", `The ${noun()} was generated as ${who}.`);
}

const TRIES = {
  same: ["verify-problem", () => tryPair(true)],
  different: ["verify-problem", () => tryPair(false)],
  enrol: ["gallery-problem", enrolMade],
  member: ["identify-problem", () => {
    const number = random(NUM_MADE);
    return searchMade(number, madeName(number));
  }],
  stranger: ["identify-problem", () => searchMade(NUM_MADE + random(1e9), `a ${nouns().one} outside the gallery`)],
};

function showTries() {
  const { one, many } = nouns();
  const kind = model.generated === "person" ? "people" : "voices";
  document.querySelector("#verify .hint-inline").textContent = `The model was trained on generated ${kind}. Try`;
  const labels = { same: `The same ${one}`, different: `Different ${many}`, enrol: `Enrol ten generated ${kind}` };
  Object.entries(labels).forEach(([name, label]) => {
    document.querySelector(`[data-try="${name}"]`).textContent = label;
  });
  document.querySelectorAll(".generated").forEach((row) => { row.hidden = false; });
}

document.querySelectorAll("[data-try]").forEach((button) => {
  button.addEventListener("click", () => reported(...TRIES[button.dataset.try]));
});

// -- start --------------------------------------------------------------------------------------

function nearest(values, wanted) {
  const distance = (value) => Math.abs(Math.log(value / wanted));
  return values.reduce((best, value, i) => (distance(value) < distance(values[best]) ? i : best), 0);
}

const FITS = {
  auto: "in pictures of other sizes, the face is found and aligned",
  align: "in every picture, the face is found and aligned",
  resize: "pictures of other sizes are scaled",
  exact: "pictures of other sizes are refused",
};

function showModel() {
  byId("model-name").textContent = model.name;
  document.title = `qmargin: ${model.name}`;
  byId("intended").textContent = `Intended use: ${model.intended_use}.`;
  byId("limits-of-use").textContent = `Limits: ${model.limits_of_use}.`;
  const { limits } = model;
  const facts = {
    Model: model.name,
    Takes: isAudio() ? "recordings" : `pictures of ${model.input_shape[2]} × ${model.input_shape[1]} pixels; ${FITS[model.fit]}`,
    Embedding: `${model.embedding_dim} numbers`,
    Weights: model.weights_sha256,
    Evaluation: model.thresholds ? model.thresholds.protocol : "none",
    Limits: `${limits.upload_bytes / (1 << 20)} MiB and ${limits.batch} files a request, ` + (isAudio() ? `${limits.seconds} s a recording` : `${limits.pixels.toLocaleString("en")} pixels a picture`),
  };
  byId("facts").replaceChildren(...Object.entries(facts).map(([name, text]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: text }))));
  if (model.generated) showTries();
  document.querySelectorAll(".many").forEach((place) => { place.textContent = nouns().many; });
  byId("enrol-files").accept = isAudio() ? "audio/*" : "image/*";
  if (points().length) {
    byId("far").max = points().length - 1;
    byId("far").value = nearest(points().map((one) => one.far_target), model.chosen.far);
    byId("rate").hidden = false;
    byId("fpir").max = model.fpirs.length - 1;
    byId("fpir").value = nearest(model.fpirs, model.chosen.fpir);
    byId("fpir-rate").hidden = false;
  }
  byId("no-threshold").hidden = !model.how_to;
  byId("no-threshold").replaceChildren(...coded(`${model.how_to}.`));
  Object.values(slots).forEach((slot) => slot.ready());
  showOutcome();
  showRate();
  showFpir();
}

function start() {
  return reported("problem", async () => {
    model = await ask("GET", "model");
    byId("token-form").hidden = true;
    showModel();
    showGallery(await ask("GET", "gallery"));
    root.dataset.ready = "true";
  });
}

document.querySelectorAll(".slot").forEach((place) => {
  const titles = { a: ["A", "file A", verify], b: ["B", "file B", verify], probe: ["Probe", "the probe", identify] };
  slots[place.dataset.slot] = makeSlot(place, ...titles[place.dataset.slot]);
});
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  start();
});
window.addEventListener("dragover", (event) => event.preventDefault());
window.addEventListener("drop", (event) => event.preventDefault()); // a miss does not leave the page
start();
