import { $ } from "../common/dom.js";
import { milliseconds, significant } from "../common/format.js";
import { panel, showFormulas, showNotes, showTiles } from "./panel.js";
import { Playback, requestTable } from "./playback.js";
import { promptList } from "./prompts.js";

const playback = new Playback();
const drawPrompts = promptList(() => here);

function draw(data) {
  playback.load(data.play);
  const { gap_ms: gap, gap_alone_ms: alone, factor, stalled_ms: stalled, ttft_short_ms: short, ttft_long_ms: long } = data.measures;
  showTiles([
    { name: "Longest gap of a stream", value: milliseconds(gap), about: alone ? `${milliseconds(alone)} without the prompts` : "no streams", tone: factor > 2 ? "bad" : "good" },
    { name: "Interference", value: factor ? `${significant(factor)} ×` : "–", about: "longest gap, with ÷ without" },
    { name: "Streams stood still", value: stalled ? milliseconds(stalled) : "–", about: "in all, the worst of them" },
    { name: "First token, long prompt", value: milliseconds(long), about: "the slowest" },
    { name: "First token, short prompt", value: milliseconds(short), about: short === null ? "add one behind a long one" : "the slowest" },
  ]);
  showNotes(data.notes);
  showFormulas(data);
  requestTable($("#requests"), data.play.requests);
}

const here = panel({ name: "interference", draw, onState: () => drawPrompts() });
