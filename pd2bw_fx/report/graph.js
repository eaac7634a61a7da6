"use strict";
// Draws the operator graph on a canvas: only what is in view, and names only where they can be read.
(() => {
  const data = JSON.parse(document.getElementById("pd-data").textContent);
  const canvas = document.getElementById("pd-canvas");
  const panel = document.getElementById("pd-panel");
  const search = document.getElementById("pd-search");
  const found = document.getElementById("pd-found");
  const colourBy = document.getElementById("pd-colour");
  const pen = canvas.getContext("2d");
  const darkPage = matchMedia("(prefers-color-scheme: dark)");
  const [boxWidth, boxHeight] = data.box;
  const nodes = data.nodes;
  const reads = nodes.map(() => []);
  const readers = nodes.map(() => []);
  for (const [from, to] of data.edges) {
    reads[to].push(from);
    readers[from].push(to);
  }
  const haystacks = nodes.map((n) => [n.name, n.target, n.module, n.kind, n.source].join("\n").toLowerCase());
  const largest = {
    time: Math.max(1e-30, ...nodes.map((n) => n.forward_s + n.backward_s)),
    memory: Math.max(1, ...nodes.map((n) => n.output_bytes + n.saved_bytes)),
  };

  // The view: a point (x, y) of the layout is drawn at (x * scale + left, y * scale + top).
  const view = { scale: 1, left: 0, top: 0 };
  let selected = -1;
  let hovered = -1;
  let matches = null; // a set of node numbers while there is a search
  let isDrawing = false;

  const colour = (name) => data.colours[name][darkPage.matches ? 1 : 0];
  const hue = (stage) => (stage < 0 ? colour("muted") : data.hues[stage % data.hues.length]);

  function mixed(first, second, share) {
    const channel = (text, at) => parseInt(text.slice(at, at + 2), 16);
    const parts = [1, 3, 5].map((at) => Math.round(share * channel(first, at) + (1 - share) * channel(second, at)));
    return `rgb(${parts.join(",")})`;
  }

  function fill(node) {
    if (colourBy.value === "stage") return mixed(hue(node.stage), colour("surface"), darkPage.matches ? 0.5 : 0.3);
    const amount =
      colourBy.value === "time"
        ? (node.forward_s + node.backward_s) / largest.time
        : (node.output_bytes + node.saved_bytes) / largest.memory;
    return mixed(data.hues[1], colour("track"), Math.sqrt(amount));
  }

  function fit() {
    const { clientWidth: width, clientHeight: height } = canvas;
    // Above the regions stand their titles.
    view.scale = Math.min((width - 24) / data.size[0], (height - 48) / data.size[1], 1.5);
    view.left = (width - data.size[0] * view.scale) / 2;
    view.top = (height - data.size[1] * view.scale) / 2 + 12;
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
  }

  function drawRegions() {
    for (const region of data.regions) {
      const [x, y, width, height] = region.at;
      pen.fillStyle = mixed(hue(region.stage), colour("surface"), 0.07);
      pen.strokeStyle = mixed(hue(region.stage), colour("surface"), 0.55);
      pen.lineWidth = 1 / view.scale;
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
    const bend = Math.max(30, Math.abs(bx - x1) / 2);
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
      if (from === selected || to === selected) lit.push(edge);
      else if (nodes[from].stage === nodes[to].stage) inside.push(edge);
      else if (nodes[from].stage < 0) everywhere.push(edge);
      else {
        const stage = nodes[from].stage;
        if (!crossing.has(stage)) crossing.set(stage, []);
        crossing.get(stage).push(edge);
      }
    }
    stroke(everywhere, colour("muted"), 0.6, 0.18);
    stroke(inside, colour("muted"), 1, 0.55);
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

  // What the panel tells.

  function seconds(value) {
    if (value >= 1) return `${value.toPrecision(3)} s`;
    if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
    return `${(value * 1e6).toPrecision(3)} µs`;
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) {
      value /= 1024;
      unit++;
    }
    return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
  }

  function element(tag, text) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function links(numbers) {
    const list = element("span");
    numbers.slice(0, 12).forEach((number, at) => {
      if (at) list.append(", ");
      const link = element("a", nodes[number].name);
      link.href = "#pd-graph";
      link.addEventListener("click", (event) => {
        event.preventDefault();
        choose(number, true);
      });
      list.append(link);
    });
    if (numbers.length > 12) list.append(` and ${numbers.length - 12} more`);
    return list;
  }

  function tell() {
    panel.replaceChildren();
    if (selected < 0) {
      const shown = `${nodes.length} operators and inputs. Click one to see its source line, cost and memory; `;
      panel.append(element("h3", "The operator graph"));
      panel.append(element("p", `${shown}drag to move, scroll to zoom, Enter in the search goes from match to match.`));
      return;
    }
    const node = nodes[selected];
    panel.append(element("h3", node.name));
    const list = element("dl");
    const row = (name, value) => {
      if (value === "" || value === undefined) return;
      list.append(element("dt", name));
      const cell = element("dd");
      cell.append(value);
      list.append(cell);
    };
    row("operator", node.target);
    row("module", [node.module, node.kind && `(${node.kind})`].filter(Boolean).join(" "));
    row("source", node.source);
    row("stage", node.stage < 0 ? "each that reads it" : String(node.stage));
    row("gives", node.shapes.join(", "));
    if (node.target !== "input of the model") {
      row("forward", seconds(node.forward_s));
      row("backward", seconds(node.backward_s));
      row("saved", bytes(node.saved_bytes));
    }
    row("output", bytes(node.output_bytes));
    row("holds", node.parameters.join(", "));
    if (reads[selected].length) row("reads", links(reads[selected]));
    if (readers[selected].length) row("read by", links(readers[selected]));
    panel.append(list, element("p", node.why));
    if (node.line) {
      const link = element("a", `stage ${node.line[0]}, line ${node.line[1]} of the generated code`);
      link.href = `#code-${node.line[0]}-${node.line[1]}`;
      link.id = "pd-to-code";
      link.addEventListener("click", (event) => {
        event.preventDefault();
        showCode(...node.line);
      });
      const paragraph = element("p");
      paragraph.append(link);
      panel.append(paragraph);
    }
  }

  function showCode(stage, line) {
    const row = document.getElementById(`code-${stage}-${line}`);
    if (!row) return;
    document.querySelectorAll(".pd-row.pd-shown").forEach((other) => other.classList.remove("pd-shown"));
    row.closest("details").open = true;
    row.classList.add("pd-shown");
    row.scrollIntoView({ block: "center" });
  }

  function choose(number, isMoving) {
    selected = number;
    if (isMoving && number >= 0) {
      view.scale = Math.max(view.scale, 0.8);
      view.left = canvas.clientWidth / 2 - (nodes[number].at[0] + boxWidth / 2) * view.scale;
      view.top = canvas.clientHeight / 2 - (nodes[number].at[1] + boxHeight / 2) * view.scale;
    }
    tell();
    redraw();
  }

  // Hands and keys.

  function nodeAt(event) {
    const frame = canvas.getBoundingClientRect();
    const x = (event.clientX - frame.left - view.left) / view.scale;
    const y = (event.clientY - frame.top - view.top) / view.scale;
    return nodes.findIndex((n) => x >= n.at[0] && x <= n.at[0] + boxWidth && y >= n.at[1] && y <= n.at[1] + boxHeight);
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
      if (kind === "pointerup" && moved < 5) choose(nodeAt(event), false);
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
  tell();
  fit();
})();
