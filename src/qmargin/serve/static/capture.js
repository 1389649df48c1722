// A picture from the camera or a recording from the microphone. The promise `other` ends a capture.

import { element } from "./dom.js";

const MOST_RECORDED_S = 10;

export function deviceProblem(error) {
  if (error.name === "NotAllowedError") return "The browser did not allow it; allow it next to the address, or choose a file";
  if (error.name === "NotFoundError") return "No device was found; connect one, or choose a file";
  return error.message;
}

async function devices(wanted) {
  if (!navigator.mediaDevices) {
    throw new Error("Browsers allow the camera and the microphone only on pages of this machine or over https; choose a file");
  }
  return navigator.mediaDevices.getUserMedia(wanted);
}

export async function capturePicture(view, other) {
  const stream = await devices({ video: { facingMode: "user" } });
  const video = element("video", { autoplay: true, muted: true, playsInline: true, srcObject: stream });
  video.setAttribute("aria-label", "Camera");
  const take = element("button", { type: "button", className: "take", textContent: "Take the picture" });
  view.replaceChildren(video, take);
  take.focus();
  try {
    const taken = new Promise((done) => { take.addEventListener("click", done, { once: true }); });
    if ((await Promise.race([taken, other])) === "other") return null;
    const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    return await new Promise((done) => { canvas.toBlob(done, "image/png"); });
  } finally {
    stream.getTracks().forEach((track) => track.stop());
  }
}

export async function captureSound(view, other) {
  const stream = await devices({ audio: true });
  const context = new AudioContext();
  try {
    await context.audioWorklet.addModule("/recorder.js");
    const node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    const stop = element("button", { type: "button", className: "take", textContent: "Stop" });
    const level = element("meter", { className: "level", max: 1 });
    level.setAttribute("aria-label", "Level");
    const parts = [];
    node.port.onmessage = ({ data }) => {
      parts.push(data);
      level.value = Math.max(...data.map(Math.abs));
    };
    view.replaceChildren("Recording, speak now", level, stop);
    stop.focus();
    context.createMediaStreamSource(stream).connect(node);
    const taken = new Promise((done) => {
      stop.addEventListener("click", done, { once: true });
      window.setTimeout(done, 1000 * MOST_RECORDED_S);
    });
    if ((await Promise.race([taken, other])) === "other") return null;
    return waveFile(parts, context.sampleRate);
  } finally {
    stream.getTracks().forEach((track) => track.stop());
    await context.close();
  }
}

function waveFile(parts, rate) {
  const size = parts.reduce((sum, part) => sum + part.length, 0);
  const view = new DataView(new ArrayBuffer(44 + 2 * size));
  const write = (place, text) => [...text].forEach((sign, i) => view.setUint8(place + i, sign.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * size, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, 2 * size, true);
  let place = 44;
  parts.forEach((part) => part.forEach((value) => {
    view.setInt16(place, 32767 * Math.max(-1, Math.min(1, value)), true);
    place += 2;
  }));
  return new Blob([view], { type: "audio/wav" });
}
