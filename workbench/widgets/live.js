// Show a live drawing's parts, each replaced only when it changed.  Python draws them (workbench/plots/svg.py), so the same
// picture stays in the notebook without a kernel.  Here are only layout, and packets on the links of a map.

const PARTS = ["head", "map", "loss", "devices", "step", "notes", "more"];
const BOARD = new Set(["map", "loss", "devices", "step"]); // next to each other where there is room

function render({ model, el }) {
  el.classList.add("workbench-live");
  const board = document.createElement("div");
  board.className = "workbench-board";
  for (const name of PARTS) {
    const place = document.createElement("div");
    place.className = `workbench-live-${name}`;
    if (name === "notes") el.append(board);
    (BOARD.has(name) ? board : el).append(place);
    const show = () => {
      const wasOpen = place.querySelector("details")?.open; // who reads the table keeps it
      place.innerHTML = model.get(name);
      place.hidden = !model.get(name);
      if (wasOpen) place.querySelector("details")?.setAttribute("open", "");
      if (name === "map") movePackets(el, model.get("time_s"));
    };
    model.on(`change:${name}`, show);
    show();
  }
  model.on("change:time_s", () => movePackets(el, model.get("time_s")));
}

// Draw a dot for each message that is under way at a moment of the step.  Before the first moment (below 0) there is none.
function movePackets(el, time_s) {
  for (const packet of el.querySelectorAll(".workbench-packet")) packet.remove();
  if (time_s < 0) return;
  for (const link of el.querySelectorAll(".workbench-link")) {
    for (const message of link.dataset.times.split(" ")) {
      const [begin, end] = message.split(":").map(Number);
      if (time_s < begin || time_s >= end) continue;
      const at = link.getPointAtLength((link.getTotalLength() * (time_s - begin)) / (end - begin));
      const packet = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      packet.setAttribute("class", "workbench-packet");
      packet.setAttribute("cx", at.x);
      packet.setAttribute("cy", at.y);
      packet.setAttribute("r", 5);
      link.after(packet);
    }
  }
}

export default { render };
