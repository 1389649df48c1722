"use strict";
// Passes microphone samples on to the page; nothing is kept here.
registerProcessor("recorder", class extends AudioWorkletProcessor {
  process(inputs) {
    if (inputs[0].length) this.port.postMessage(inputs[0][0].slice());
    return true;
  }
});
