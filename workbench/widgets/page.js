// What ipywidgets and JupyterLab leave out, for every widget of the page: names and values for screen readers, keys that stay
// with a control, and the whole list of a field that offers values.

const CONTROLS = "select, button, .noUi-handle";
const NAMELESS = ".noUi-handle, input, select, .widget-readout[contenteditable], .widget-play button";

function nameControls() {
  for (const control of document.querySelectorAll(`.jupyter-widgets :is(${NAMELESS}):not([aria-label])`)) {
    const box = control.closest(".jupyter-widgets:not(button)");
    const label = box.querySelector("label");
    const icon = control.querySelector("i")?.className.match(/fa-(\w+)/)?.[1]; // of a player: play, stop, repeat
    const own = control.closest(".widget-play") && icon ? { play: "Play", pause: "Pause", stop: "Stop", repeat: "Repeat" }[icon] ?? icon : "";
    // ipywidgets drops the tooltip of a field for text, so our fields give it as the hint in the empty field.
    if (control.matches(".workbench-field input") && !control.title) control.title = control.placeholder;
    const name = own || control.title || label?.title || box.title || label?.textContent;
    if (!name) continue;
    control.setAttribute("aria-label", control.matches(".widget-readout") ? `${name}, typed` : name);
    if (control.matches(".widget-readout")) control.setAttribute("role", "textbox");
  }
}

// A slider's value in words: ipywidgets gives the position in its list.
function sayValues() {
  for (const handle of document.querySelectorAll(".jupyter-widgets .noUi-handle")) {
    const readout = handle.closest(".jupyter-widgets")?.querySelector(".widget-readout");
    const value = readout?.textContent.trim();
    if (value && handle.getAttribute("aria-valuetext") !== value) handle.setAttribute("aria-valuetext", value);
  }
}

// An alert belongs to its field.
let alerts = 0;
function tieAlerts() {
  for (const field of document.querySelectorAll(".workbench-field")) {
    const alert = field.querySelector("[role=alert]");
    if (alert && !alert.id) alert.id = `workbench-alert-${++alerts}`;
    for (const input of field.querySelectorAll("input")) {
      if ((input.getAttribute("aria-describedby") ?? "") === (alert?.id ?? "")) continue;
      input.toggleAttribute("aria-invalid", Boolean(alert));
      if (alert) {
        input.setAttribute("aria-invalid", "true");
        input.setAttribute("aria-describedby", alert.id);
      } else input.removeAttribute("aria-describedby");
    }
  }
}

function mend() {
  nameControls();
  sayValues();
  tieAlerts();
}

// JupyterLab would take "d d" in a drop-down list for "delete this cell".  Keys with Ctrl, such as Ctrl+S, still reach it.
function keepKeys(event) {
  const control = event.target.closest?.(CONTROLS);
  if (!control?.closest(".jupyter-widgets")) return;
  const isShortcut = event.ctrlKey || event.metaKey || event.altKey;
  event.target.toggleAttribute("data-lm-suppress-shortcuts", !isShortcut);
}

// A browser offers only the values that contain what the field already says.  Its arrow must show them all.
const ARROW_PIXELS = 24;
function offerAll(event) {
  const input = event.target;
  if (!input.matches?.(".jupyter-widgets input[list]") || input.disabled) return;
  if (event.clientX < input.getBoundingClientRect().right - ARROW_PIXELS) return;
  const before = input.value;
  input.placeholder = before;
  input.value = "";
  input.addEventListener("blur", () => { input.value ||= before; }, { once: true });
}

export default {
  render({ model, el }) {
    if (!window.workbenchPage) {
      window.addEventListener("keydown", keepKeys, true);
      window.addEventListener("pointerdown", offerAll, true);
      const changes = { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-valuetext", "class"] };
      let waits = false;
      new MutationObserver(() => {
        if (waits) return;
        waits = true;
        requestAnimationFrame(() => { waits = false; mend(); });
      }).observe(document.body, changes);
      window.workbenchPage = true;
    }
    mend();
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
