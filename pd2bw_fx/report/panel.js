"use strict";
// The panel beside the graph: the stages, one stage, or one operator. `go` moves the picture: go.toNode(number),
// go.toStage(stage), go.toAll().
function pdPanel(data, root, go) {
  const nodes = data.nodes;
  const reads = nodes.map(() => []);
  const readers = nodes.map(() => []);
  for (const [from, to] of data.edges) {
    reads[to].push(from);
    readers[from].push(to);
  }

  function seconds(value) {
    if (value >= 1) return `${value.toPrecision(3)} s`;
    if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
    return `${(value * 1e6).toPrecision(3)} µs`;
  }

  function element(tag, content, name) {
    const made = document.createElement(tag);
    if (content !== undefined) made.append(content);
    if (name) made.className = name;
    return made;
  }

  function link(text, act) {
    const made = element("a", text);
    made.href = "#pd-graph";
    made.addEventListener("click", (event) => {
      event.preventDefault();
      act();
    });
    return made;
  }

  function nodeLinks(numbers) {
    const list = element("span");
    numbers.slice(0, 12).forEach((number, at) => {
      if (at) list.append(", ");
      list.append(link(nodes[number].name, () => go.toNode(number)));
    });
    if (numbers.length > 12) list.append(` and ${numbers.length - 12} more`);
    return list;
  }

  function facts(rows) {
    const list = element("dl");
    for (const [name, value] of rows) {
      if (value === "" || value === undefined) continue;
      list.append(element("dt", name), element("dd", value));
    }
    return list;
  }

  function codeLink(text, stage, line) {
    const made = link(text, () => showCode(stage, line));
    made.href = line ? `#code-${stage}-${line}` : `#stage-${stage}`;
    made.id = "pd-to-code";
    return element("p", made);
  }

  function showCode(stage, line) {
    const page = document.getElementById(`stage-${stage}`);
    const row = line ? document.getElementById(`code-${stage}-${line}`) : page;
    if (!page || !row) return;
    document.querySelectorAll(".pd-row.pd-shown").forEach((other) => other.classList.remove("pd-shown"));
    page.open = true;
    if (line) row.classList.add("pd-shown");
    row.scrollIntoView({ block: line ? "center" : "start" });
  }

  function all() {
    const help =
      `${nodes.length} operators and inputs. Click one, or a stage; drag to move, scroll to zoom; ` +
      "Enter in the search goes from match to match.";
    const list = element("div", undefined, "pd-stages");
    const longest = Math.max(1e-30, ...data.stages.map((stage) => stage.load_s));
    for (const stage of data.stages) {
      const pick = element("button", undefined, "pd-pick");
      pick.type = "button";
      const bar = element("i");
      bar.style.background = data.hues[stage.stage % data.hues.length];
      bar.style.width = `${Math.max(3, (100 * stage.load_s) / longest)}%`;
      pick.append(element("span", `stage ${stage.stage} · ${stage.device}`), element("b", seconds(stage.load_s)), bar);
      pick.addEventListener("click", () => go.toStage(stage.stage));
      list.append(pick);
    }
    root.replaceChildren(element("h3", "The operator graph"), element("p", help), list);
  }

  function crossing(transfers, end) {
    const list = element("span");
    transfers.slice(0, 12).forEach((sent, at) => {
      if (at) list.append(element("br"));
      const back = sent.back ? `, ${sent.back} back` : "";
      list.append(link(nodes[sent.node].name, () => go.toNode(sent.node)), `, ${sent.bytes}${back}, `);
      list.append(link(`stage ${sent[end]}`, () => go.toStage(sent[end])));
    });
    if (transfers.length > 12) list.append(element("br"), `and ${transfers.length - 12} more`);
    return transfers.length ? list : "";
  }

  function stage(number) {
    const own = data.stages[number];
    const list = facts([
      ["operators", `${own.operators}`],
      ["modules", own.modules],
      ["forward", own.forward],
      ["backward", own.backward],
      ["links", own.links],
      ["memory", own.memory],
      ["receives", crossing(data.transfers.filter((sent) => sent.target === number), "source")],
      ["sends", crossing(data.transfers.filter((sent) => sent.source === number), "target")],
    ]);
    root.replaceChildren(element("h3", `stage ${number} · ${own.device}`), list, element("p", own.why));
    if (document.getElementById(`stage-${number}`)) root.append(codeLink("its generated code", number, 0));
    root.append(element("p", link("all stages", go.toAll)));
  }

  function node(number) {
    const own = nodes[number];
    const isInput = own.target === "input of the model";
    const list = facts([
      ["operator", own.target],
      ["module", [own.module, own.kind && `(${own.kind})`].filter(Boolean).join(" ")],
      ["source", own.source],
      ["stage", own.stage < 0 ? "each that reads it" : link(String(own.stage), () => go.toStage(own.stage))],
      ["gives", own.shapes.join(", ")],
      ["forward", isInput ? "" : seconds(own.forward_s)],
      ["backward", isInput ? "" : seconds(own.backward_s)],
      ["saved", isInput ? "" : own.saved],
      ["output", own.output],
      ["holds", own.parameters.join(", ")],
      ["reads", reads[number].length ? nodeLinks(reads[number]) : ""],
      ["read by", readers[number].length ? nodeLinks(readers[number]) : ""],
    ]);
    root.replaceChildren(element("h3", own.name), list, element("p", own.why));
    if (own.line) root.append(codeLink(`stage ${own.line[0]}, line ${own.line[1]} of the generated code`, ...own.line));
    root.append(element("p", link("all stages", go.toAll)));
  }

  return { all, stage, node };
}
