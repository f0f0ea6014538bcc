// A button that copies a text, and shows it below with what became of it.

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // no permission, or a page without TLS
  }
}

export default {
  render({ model, el }) {
    const button = document.createElement("button");
    button.className = "jupyter-widgets jupyter-button widget-button workbench-copy";
    button.type = "button";
    const said = document.createElement("span");
    said.setAttribute("role", "status");
    const shown = document.createElement("pre");
    shown.className = "workbench-copied";
    shown.tabIndex = 0;
    shown.hidden = true;
    const update = () => {
      button.textContent = model.get("label");
      button.title = model.get("hint");
      button.disabled = !model.get("text");
      shown.textContent = model.get("text");
      said.textContent = "";
    };
    button.addEventListener("click", async () => {
      shown.hidden = false;
      said.textContent = (await copied(model.get("text"))) ? " Copied." : " Not copied: select the text below.";
    });
    model.on("change:text", update);
    update();
    shown.setAttribute("aria-label", model.get("label"));
    shown.setAttribute("role", "region");
    el.append(button, said, shown);
  },
};
