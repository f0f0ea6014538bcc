// What ipywidgets and JupyterLab leave out, for every widget of the page: names for controls, keys that stay with a control.

const CONTROLS = "select, button, .noUi-handle";

function nameControls() {
  for (const control of document.querySelectorAll(".jupyter-widgets :is(.noUi-handle, input, select, .widget-play button):not([aria-label])")) {
    const box = control.closest(".jupyter-widgets");
    const label = box.querySelector("label");
    const icon = control.querySelector("i")?.className.match(/fa-(\w+)/)?.[1]; // of a player: play, stop, repeat
    const name = control.title || label?.title || box.title || label?.textContent || icon;
    if (name) control.setAttribute("aria-label", name);
  }
}

// JupyterLab would take "d d" in a drop-down list for "delete this cell".  Keys with Ctrl, such as Ctrl+S, still reach it.
function keepKeys(event) {
  const control = event.target.closest?.(CONTROLS);
  if (!control?.closest(".jupyter-widgets")) return;
  const isShortcut = event.ctrlKey || event.metaKey || event.altKey;
  event.target.toggleAttribute("data-lm-suppress-shortcuts", !isShortcut);
}

export default {
  render({ model, el }) {
    if (!window.workbenchPage) {
      window.addEventListener("keydown", keepKeys, true);
      new MutationObserver(() => requestAnimationFrame(nameControls)).observe(document.body, { childList: true, subtree: true });
      window.workbenchPage = true;
    }
    nameControls();
    requestAnimationFrame(() => {
      const box = el.closest(".widget-vbox");
      const observer = new ResizeObserver(() => {
        if (!box.clientWidth || box.clientWidth === model.get("width")) return; // 0: in a tab that is not in front
        model.set("width", box.clientWidth);
        model.save_changes();
      });
      if (box) observer.observe(box);
    });
  },
};
