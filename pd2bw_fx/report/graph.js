"use strict";
// Draws the operator graph on a canvas: only what is in view, and names only where they can be read.
(() => {
  const data = JSON.parse(document.getElementById("pd-data").textContent);
  const canvas = document.getElementById("pd-canvas");
  const panel = pdPanel(data, document.getElementById("pd-panel"), {
    toNode: (number) => choose(number, true),
    toStage: (stage) => chooseStage(stage, true),
    toAll: () => {
      choose(-1, false);
      fit();
    },
  });
  const search = document.getElementById("pd-search");
  const found = document.getElementById("pd-found");
  const colourBy = document.getElementById("pd-colour");
  const pen = canvas.getContext("2d");
  const darkPage = matchMedia("(prefers-color-scheme: dark)");
  const [boxWidth, boxHeight] = data.box;
  const nodes = data.nodes;
  const haystacks = nodes.map((n) => [n.name, n.target, n.module, n.kind, n.source].join("\n").toLowerCase());
  const largest = {
    time: Math.max(1e-30, ...nodes.map((n) => n.forward_s + n.backward_s)),
    memory: Math.max(1, ...nodes.map((n) => n.output_bytes + n.saved_bytes)),
  };

  const cuts = new Map(); // of a value's operator, what is told beside it
  for (const sent of data.transfers) {
    const told = cuts.get(sent.node);
    cuts.set(sent.node, told ? `${told}, ${sent.target}` : `${sent.bytes} to ${sent.target}`);
  }

  // The view: a point (x, y) of the layout is drawn at (x * scale + left, y * scale + top).
  const view = { scale: 1, left: 0, top: 0 };
  let selected = -1;
  let chosenStage = -1;
  let hovered = -1;
  let matches = null; // a set of node numbers while there is a search
  let isDrawing = false;

  const colour = (name) => data.colours[name][darkPage.matches ? 1 : 0];
  const hue = (stage) => (stage < 0 ? colour("muted") : data.hues[stage % data.hues.length]);

  const mixes = new Map();
  function mixed(first, second, share) {
    const key = `${first}${second}${share}`;
    let found = mixes.get(key);
    if (found === undefined) {
      const channel = (text, at) => parseInt(text.slice(at, at + 2), 16);
      const parts = [1, 3, 5].map((at) => Math.round(share * channel(first, at) + (1 - share) * channel(second, at)));
      found = `rgb(${parts.join(",")})`;
      mixes.set(key, found);
    }
    return found;
  }

  function fill(node) {
    if (colourBy.value === "stage") return mixed(hue(node.stage), colour("surface"), darkPage.matches ? 0.5 : 0.3);
    const amount =
      colourBy.value === "time"
        ? (node.forward_s + node.backward_s) / largest.time
        : (node.output_bytes + node.saved_bytes) / largest.memory;
    return mixed(data.hues[1], colour("track"), Math.sqrt(amount));
  }

  const fit = () => show(0, 0, ...data.size);

  function show(x, y, width, height) {
    const { clientWidth: wide, clientHeight: high } = canvas;
    // Above the regions stand their titles.
    view.scale = Math.min((wide - 24) / width, (high - 48) / height, 1.5);
    view.left = (wide - width * view.scale) / 2 - x * view.scale;
    view.top = (high - height * view.scale) / 2 + 12 - y * view.scale;
    redraw();
  }

  function redraw() {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => {
      isDrawing = false;
      draw();
    });
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.setTransform(ratio * view.scale, 0, 0, ratio * view.scale, ratio * view.left, ratio * view.top);
    const seen = {
      left: -view.left / view.scale,
      top: -view.top / view.scale,
      right: (width - view.left) / view.scale,
      bottom: (height - view.top) / view.scale,
    };
    drawRegions();
    drawEdges(seen);
    drawNodes(seen);
    drawCuts(seen);
  }

  function drawRegions() {
    for (const region of data.regions) {
      const [x, y, width, height] = region.at;
      const isLit = region.stage === chosenStage && chosenStage >= 0;
      pen.fillStyle = mixed(hue(region.stage), colour("surface"), isLit ? 0.16 : 0.07);
      pen.strokeStyle = isLit ? hue(region.stage) : mixed(hue(region.stage), colour("surface"), 0.55);
      pen.lineWidth = (isLit ? 2.5 : 1) / view.scale;
      pen.beginPath();
      pen.roundRect(x, y, width, height, 10);
      pen.fill();
      pen.stroke();
      // The whole title where it can be read, else the stage's number, as large as it may be.
      const [title, size] = fitting(region, Math.min(58, Math.max(16, 12 / view.scale)), width - 8);
      pen.font = `600 ${size}px system-ui, sans-serif`;
      pen.fillStyle = colour("ink");
      pen.textBaseline = "bottom";
      pen.fillText(title, x + 4, y - 3 / view.scale);
    }
  }

  function fitting(region, wanted, width) {
    const sizeOf = (text) => {
      pen.font = `600 ${wanted}px system-ui, sans-serif`;
      return wanted * Math.min(1, width / pen.measureText(text).width);
    };
    const whole = sizeOf(region.title);
    return whole * view.scale >= 7 ? [region.title, whole] : [region.short, sizeOf(region.short)];
  }

  function edgePath(from, to) {
    const [ax, ay] = nodes[from].at;
    const [bx, by] = nodes[to].at;
    if (by > ay && Math.abs(bx - ax) < boxWidth * 4 && nodes[from].stage === nodes[to].stage) {
      const half = (by - ay - boxHeight) / 2;
      const x1 = ax + boxWidth / 2;
      const x2 = bx + boxWidth / 2;
      pen.moveTo(x1, ay + boxHeight);
      pen.bezierCurveTo(x1, ay + boxHeight + half, x2, by - half, x2, by);
      return;
    }
    const x1 = ax + boxWidth;
    const y1 = ay + boxHeight / 2;
    const y2 = by + boxHeight / 2;
    // A reader further left is on the next shelf: the line crosses the page straight, not in a wide bow.
    const bend = bx < x1 ? 40 : Math.max(30, (bx - x1) / 2);
    pen.moveTo(x1, y1);
    pen.bezierCurveTo(x1 + bend, y1, bx - bend, y2, bx, y2);
  }

  function isSeen(from, to, seen) {
    const [ax, ay] = nodes[from].at;
    const [bx, by] = nodes[to].at;
    return (
      Math.max(ax, bx) + boxWidth > seen.left &&
      Math.min(ax, bx) < seen.right &&
      Math.max(ay, by) + boxHeight > seen.top &&
      Math.min(ay, by) < seen.bottom
    );
  }

  function stroke(edges, style, width, alpha) {
    pen.globalAlpha = alpha;
    pen.strokeStyle = style;
    pen.lineWidth = width / Math.max(view.scale, 0.25);
    pen.beginPath();
    for (const [from, to] of edges) edgePath(from, to);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  function drawEdges(seen) {
    const inside = [];
    const everywhere = [];
    const crossing = new Map();
    const lit = [];
    for (const edge of data.edges) {
      const [from, to] = edge;
      if (!isSeen(from, to, seen)) continue;
      const [source, target] = [nodes[from].stage, nodes[to].stage];
      const isCut = source !== target && source >= 0;
      if (from === selected || to === selected) lit.push(edge);
      else if (isCut && chosenStage >= 0 && (source === chosenStage || target === chosenStage)) lit.push(edge);
      else if (source === target) inside.push(edge);
      else if (!isCut) everywhere.push(edge);
      else {
        if (!crossing.has(source)) crossing.set(source, []);
        crossing.get(source).push(edge);
      }
    }
    // What every stage reads makes a haze over the whole: many such lines show when one can follow them.
    if (everywhere.length < 150 || view.scale > 0.5) stroke(everywhere, colour("muted"), 0.6, 0.18);
    if (view.scale > 0.12) stroke(inside, colour("muted"), 1, 0.55);
    for (const [stage, edges] of crossing) stroke(edges, hue(stage), 2, 0.85);
    stroke(lit, colour("ink"), 2.2, 1);
  }

  function drawNodes(seen) {
    const named = view.scale > 0.42;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let number = 0; number < nodes.length; number++) {
      const node = nodes[number];
      const [x, y] = node.at;
      if (x + boxWidth < seen.left || x > seen.right || y + boxHeight < seen.top || y > seen.bottom) continue;
      const isDim = matches && !matches.has(number) && number !== selected;
      pen.fillStyle = isDim ? mixed(hue(node.stage), colour("surface"), 0.1) : fill(node);
      pen.beginPath();
      if (view.scale > 0.2) pen.roundRect(x, y, boxWidth, boxHeight, 5);
      else pen.rect(x, y, boxWidth, boxHeight);
      pen.fill();
      const isLit = number === selected || number === hovered || (matches && matches.has(number));
      if (isLit) {
        pen.strokeStyle = number === selected ? colour("ink") : hue(node.stage);
        pen.lineWidth = (number === selected ? 2.5 : 1.5) / Math.max(view.scale, 0.25);
        pen.stroke();
      }
      if (named) {
        pen.fillStyle = colour(isDim ? "muted" : "ink");
        pen.fillText(shortened(node), x + 8, y + boxHeight / 2 + 0.5);
      }
    }
  }

  // What crosses, in bytes, beside the operator that makes it.
  function drawCuts(seen) {
    const size = 10.5 / view.scale;
    if (size > 34) return;
    pen.font = `${size}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    for (const [number, text] of cuts) {
      const [x, y] = [nodes[number].at[0] + boxWidth + 0.5 * size, nodes[number].at[1] + boxHeight / 2];
      if (x > seen.right || x < seen.left - 20 * size || y < seen.top || y > seen.bottom) continue;
      const width = pen.measureText(text).width + size;
      pen.fillStyle = colour("surface");
      pen.strokeStyle = hue(nodes[number].stage);
      pen.lineWidth = 1 / view.scale;
      pen.beginPath();
      pen.roundRect(x, y - 0.75 * size, width, 1.5 * size, 0.75 * size);
      pen.fill();
      pen.stroke();
      pen.fillStyle = colour("ink");
      pen.fillText(text, x + 0.5 * size, y + 0.05 * size);
    }
  }

  const shortNames = new Map();
  function shortened(node) {
    let text = shortNames.get(node);
    if (text === undefined) {
      const leaf = node.module.split(".").pop();
      text = leaf && leaf !== node.label ? `${node.label} · ${leaf}` : node.label;
      while (text.length > 3 && pen.measureText(text).width > boxWidth - 16) text = `${text.slice(0, -2)}…`;
      shortNames.set(node, text);
    }
    return text;
  }

  function choose(number, isMoving) {
    selected = number;
    chosenStage = -1;
    if (isMoving && number >= 0) {
      view.scale = Math.max(view.scale, 0.8);
      view.left = canvas.clientWidth / 2 - (nodes[number].at[0] + boxWidth / 2) * view.scale;
      view.top = canvas.clientHeight / 2 - (nodes[number].at[1] + boxHeight / 2) * view.scale;
    }
    if (number >= 0) panel.node(number);
    else panel.all();
    redraw();
  }

  function chooseStage(stage, isMoving) {
    selected = -1;
    chosenStage = stage;
    const region = data.regions.find((one) => one.stage === stage);
    if (isMoving && region) show(...region.at);
    panel.stage(stage);
    redraw();
  }

  // Hands and keys.

  function pointAt(event) {
    const frame = canvas.getBoundingClientRect();
    return [(event.clientX - frame.left - view.left) / view.scale, (event.clientY - frame.top - view.top) / view.scale];
  }

  function nodeAt(event) {
    const [x, y] = pointAt(event);
    return nodes.findIndex((n) => x >= n.at[0] && x <= n.at[0] + boxWidth && y >= n.at[1] && y <= n.at[1] + boxHeight);
  }

  function stageAt(event) {
    const [x, y] = pointAt(event);
    const above = 20 / view.scale; // the title
    const inside = ([left, top, width, height]) =>
      x >= left && x <= left + width && y >= top - above && y <= top + height;
    return (data.regions.find((region) => inside(region.at)) ?? { stage: -1 }).stage;
  }

  function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.01, view.scale * factor));
    view.left = x - ((x - view.left) * scale) / view.scale;
    view.top = y - ((y - view.top) * scale) / view.scale;
    view.scale = scale;
    redraw();
  }

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      const under = nodeAt(event);
      if (under !== hovered) {
        hovered = under;
        canvas.style.cursor = under < 0 ? "grab" : "pointer";
        canvas.title = under < 0 ? "" : `${nodes[under].name}  ${nodes[under].module}`;
        redraw();
      }
      return;
    }
    const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]];
    moved += Math.abs(dx) + Math.abs(dy);
    const other = [...pointers].find(([id]) => id !== event.pointerId);
    if (other) {
      const frame = canvas.getBoundingClientRect();
      const [ox, oy] = other[1];
      const length = (x, y) => Math.max(1, Math.hypot(x - ox, y - oy));
      zoom(length(event.clientX, event.clientY) / length(...before), ox - frame.left, oy - frame.top);
    } else {
      view.left += dx;
      view.top += dy;
      redraw();
    }
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(kind, (event) => {
      pointers.delete(event.pointerId);
      if (kind !== "pointerup" || moved >= 5) return;
      const [node, stage] = [nodeAt(event), stageAt(event)];
      if (node < 0 && stage >= 0) chooseStage(stage, false);
      else choose(node, false);
    });
  }
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const frame = canvas.getBoundingClientRect();
      const lines = event.deltaMode === 1 ? 16 : 1;
      zoom(Math.exp(-event.deltaY * lines * 0.0015), event.clientX - frame.left, event.clientY - frame.top);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (steps[event.key]) {
      view.left += steps[event.key][0];
      view.top += steps[event.key][1];
      redraw();
    } else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "Escape") choose(-1, false);
    else return;
    event.preventDefault();
  });
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    matches = wanted ? new Set(haystacks.flatMap((text, number) => (text.includes(wanted) ? [number] : []))) : null;
    found.textContent = matches ? `${matches.size} found` : "";
    redraw();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !matches || !matches.size) return;
    const all = [...matches];
    choose(all.find((number) => number > selected) ?? all[0], true);
  });
  colourBy.addEventListener("change", redraw);
  darkPage.addEventListener("change", redraw);
  document.getElementById("pd-in").addEventListener("click", () => zoom(1.4));
  document.getElementById("pd-out").addEventListener("click", () => zoom(1 / 1.4));
  document.getElementById("pd-fit").addEventListener("click", fit);
  new ResizeObserver(redraw).observe(canvas);
  panel.all();
  fit();
})();
