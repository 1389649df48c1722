"use strict";
(function () {
  const root = document.documentElement;
  root.classList.add("scripted");

  const theme = document.getElementById("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function stored(value) {
    try {
      if (value !== undefined) window.localStorage.setItem("qmargin-theme", value);
      return window.localStorage.getItem("qmargin-theme");
    } catch (error) {
      return null; // no storage, for example in a sandbox: the choice lasts as long as the page
    }
  }

  function showTheme(name) {
    root.dataset.theme = name;
    const isDark = name === "dark";
    theme.textContent = isDark ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark ? "Light theme" : "Dark theme");
  }

  const saved = stored();
  showTheme(saved === "dark" || saved === "light" ? saved : dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => {
    if (stored() === null) showTheme(dark.matches ? "dark" : "light");
  });
  theme.addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    stored(name);
    showTheme(name);
  });

  function closest(values, wanted) {
    let best = 0;
    values.forEach((value, index) => {
      if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index;
    });
    return best;
  }

  function readOut(figure, data) {
    const plot = figure.querySelector("svg.plot");
    const guide = plot.querySelector(".guide");
    const dots = guide.querySelectorAll(".dot");
    const slider = figure.querySelector(".det-slider");
    const at = figure.querySelector(".at");
    const rows = figure.querySelectorAll(".readout li");
    const parts = [".tar", ".interval", ".accepts", ".threshold"];

    function show(index) {
      guide.setAttribute("transform", `translate(${data.x[index]} 0)`);
      at.textContent = data.labels[index];
      data.systems.forEach((system, row) => {
        const y = system.y[index];
        dots[row].setAttribute("cy", y === null ? -99 : y);
        system.cells[index].forEach((text, part) => {
          rows[row].querySelector(parts[part]).textContent = text;
        });
        rows[row].classList.toggle("none", system.cells[index][1] === "" && y === null);
      });
      slider.value = index;
      slider.setAttribute("aria-valuetext", spoken(index));
    }

    function spoken(index) {
      const names = Array.from(rows, (row) => row.querySelector("bdi").textContent);
      const tars = data.systems.map((system, row) => `${names[row]} ${system.cells[index][0]}`);
      return `FAR ${data.labels[index]}: TAR % ${tars.join(", ")}`;
    }

    function follow(event) {
      const box = plot.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
      show(closest(data.x, place));
    }

    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", (event) => {
      follow(event);
      slider.focus({ preventScroll: true }); // the arrow keys continue from here
    });
    slider.addEventListener("input", () => show(Number(slider.value)));
    show(data.start);
  }

  const panels = JSON.parse(document.getElementById("det-data").textContent);
  document.querySelectorAll("figure.det").forEach((figure) => {
    readOut(figure, panels[Number(figure.dataset.panel)]);
    figure.querySelectorAll("[data-toggle]").forEach((button) => {
      button.addEventListener("click", () => {
        const isShown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isShown));
        figure.querySelectorAll(`[data-series="${button.dataset.toggle}"]`).forEach((part) => {
          part.classList.toggle("off", !isShown);
        });
      });
    });
  });

  document.querySelectorAll("button.log").forEach((button) => {
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      button.closest(".histograms").classList.toggle("is-log", isLog);
    });
  });

  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((part) => {
      part.open = true; // paper cannot be unfolded
    });
  });
})();
