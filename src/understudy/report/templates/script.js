"use strict";
(() => {
  const root = document.documentElement;
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");

  // A page opened from a file may be denied storage: the theme is then forgotten, nothing breaks.
  const recall = () => {
    try {
      return localStorage.getItem("understudy-theme");
    } catch {
      return null;
    }
  };
  const remember = (theme) => {
    try {
      localStorage.setItem("understudy-theme", theme);
    } catch {
      return;
    }
  };

  const stored = recall();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  const prepareTheme = () => {
    const button = document.getElementById("theme");
    const isDark = () => (root.dataset.theme || (wanted.matches ? "dark" : "light")) === "dark";
    const show = () => {
      button.textContent = isDark() ? "Light theme" : "Dark theme";
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remember(root.dataset.theme);
      show();
    });
    wanted.addEventListener("change", show);
    show();
    button.hidden = false;
  };

  const prepareZoom = () => {
    const dialog = document.getElementById("zoom");
    const picture = document.getElementById("zoom-image");
    const text = document.getElementById("zoom-text");
    const tiles = [...document.querySelectorAll(".tile")];
    let at = 0;

    const show = (place) => {
      at = (place + tiles.length) % tiles.length;
      const image = tiles[at].querySelector("img");
      picture.src = image.src;
      picture.alt = image.alt;
      text.textContent = image.alt;
    };
    tiles.forEach((tile, place) => {
      tile.addEventListener("click", () => {
        show(place);
        dialog.showModal();
      });
    });
    document.getElementById("zoom-back").addEventListener("click", () => show(at - 1));
    document.getElementById("zoom-on").addEventListener("click", () => show(at + 1));
    document.getElementById("zoom-close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (step) {
        event.preventDefault();
        show(at + step);
      }
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
    dialog.addEventListener("close", () => tiles[at].focus());
  };

  document.addEventListener("DOMContentLoaded", () => {
    prepareTheme();
    prepareZoom();
  });
})();
