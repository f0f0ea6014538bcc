// Knobs on the cards of a map of devices (workbench/plots/cluster_map.py): dragged, or moved by keys like any slider.
// Python draws the cards again whenever a value changes; the knobs stay, so that a drag or the focus does not end.

const PAGE = 5; // stops of Page Up and Page Down
const ANSWER_MS = 2000; // after that, a knob stands where Python has it

function render({ model, el }) {
  el.classList.add("workbench-live");
  const board = document.createElement("div");
  board.className = "workbench-cards";
  el.append(board);
  let cards = [], built = null;
  const show = () => {
    const given = model.get("cards"), dials = model.get("dials");
    if (dials !== built) {
      built = dials;
      board.style.setProperty("--workbench-devices", given.length);
      cards = given.map(({ name }, device) => makeCard(model, name, device));
      board.replaceChildren(...cards.map(one => one.element));
    }
    given.forEach((one, at) => cards[at].show(one));
  };
  model.on("change:cards", show);
  show();
}

function makeCard(model, name, device) {
  const element = document.createElement("div"), drawing = document.createElement("div");
  element.className = "workbench-card";
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
  element.append(drawing);
  const knobs = model.get("dials")[device].map(dial => {
    const report = stop => model.send({ device, what: dial.what, stop });
    const knob = makeKnob(dial, model.get("tracks")[dial.what], report);
    element.append(knob.track, knob.handle);
    return knob;
  });
  let shown = "";
  return {
    element,
    show(given) {
      if (given.drawing !== shown) drawing.innerHTML = shown = given.drawing;
      given.values.forEach(([share, text], at) => knobs[at].show(share, text));
    },
  };
}

// A knob on its track.  Until Python has answered, it stands where it was moved to.
function makeKnob(dial, place, report) {
  let share = 0, answer = { share: 0, text: "" }, isDragged = false, awaited = null, timer = 0;
  const track = document.createElement("div"), handle = document.createElement("div"), said = document.createElement("span");
  const isUpright = place.begin_y !== place.end_y;
  track.className = "workbench-track";
  handle.className = "workbench-knob";
  handle.tabIndex = 0;
  handle.title = dial.label;
  handle.setAttribute("role", "slider");
  handle.setAttribute("aria-label", dial.label);
  handle.setAttribute("aria-orientation", isUpright ? "vertical" : "horizontal");
  handle.append(said);
  const x = at => `calc(${place.left + (place.right - place.left) * at}% + ${place.aside}px)`;
  const y = at => `${place.begin_y + (place.end_y - place.begin_y) * at}px`;
  track.style.left = x(0);
  track.style.top = y(1);
  track.style.width = `${place.right - place.left}%`;
  track.style.height = `${place.begin_y - place.end_y}px`;

  const nearest = at => {
    const apart = dial.stops.map(([stop]) => Math.abs(stop - at));
    return apart.indexOf(Math.min(...apart));
  };
  const draw = text => {
    handle.style.left = x(share);
    handle.style.top = y(share);
    said.textContent = text;
    handle.setAttribute("aria-valuetext", text);
    handle.setAttribute("aria-valuemin", 0);
    handle.setAttribute("aria-valuemax", dial.stops.length - 1);
    handle.setAttribute("aria-valuenow", nearest(share));
  };
  const settle = () => {
    clearTimeout(timer);
    awaited = null;
    share = answer.share;
    draw(answer.text);
  };
  const moveTo = asked => {
    const stop = Math.min(dial.stops.length - 1, Math.max(0, asked));
    const [at, text] = dial.stops[stop];
    if (at === share) return;
    awaited = share = at;
    clearTimeout(timer);
    timer = setTimeout(settle, ANSWER_MS);
    draw(text);
    report(stop);
  };
  const follow = event => {
    const box = track.getBoundingClientRect();
    const at = isUpright ? (box.bottom - event.clientY) / box.height : (event.clientX - box.left) / box.width;
    moveTo(nearest(Math.min(1, Math.max(0, at))));
  };
  const end = () => {
    isDragged = false;
    handle.classList.remove("workbench-dragged");
  };
  for (const part of [track, handle]) {
    part.addEventListener("pointerdown", event => {
      if (event.button) return;
      event.preventDefault();
      handle.focus({ preventScroll: true });
      isDragged = true;
      handle.classList.add("workbench-dragged");
      part.setPointerCapture(event.pointerId);
      if (part === track) follow(event);
    });
    part.addEventListener("pointermove", event => isDragged && follow(event));
    part.addEventListener("pointerup", end);
    part.addEventListener("pointercancel", end);
  }
  handle.addEventListener("keydown", event => {
    const last = dial.stops.length - 1, above = dial.stops.findIndex(([at]) => at > share);
    const up = above < 0 ? last : above, down = dial.stops.findLastIndex(([at]) => at < share);
    const to = {
      ArrowUp: up, ArrowRight: up, ArrowDown: down, ArrowLeft: down,
      PageUp: up + PAGE - 1, PageDown: down - PAGE + 1, Home: 0, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    moveTo(to);
  });
  return {
    track,
    handle,
    show(given, text) {
      answer = { share: given, text };
      if (awaited === null ? !isDragged : given === awaited) settle();
    },
  };
}

export default { render };
