"""The style sheet of the page: light and dark, wide and narrow. Owns every colour and dash that a chart names."""

STYLE = """
:root{--paper:#fbf9f5;--panel:#fff;--edge:#e4dfd5;--ink:#20252e;--soft:#5c6370;--grid:#ebe6dc;
--prefill:#b4610f;--decode:#1f7393;--mixed:#7d4aa3;--down:#b3362c;--green:#3c7a46;--hatch:rgba(255,255,255,.32)}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--panel:#1b1f25;--edge:#2e343d;--ink:#ebe8e1;--soft:#a5acb8;
--grid:#2a3038;--prefill:#e9a35c;--decode:#62b6d6;--mixed:#bd97e0;--down:#f08478;--green:#85c98f;
--hatch:rgba(0,0,0,.28)}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;color-scheme:light dark}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 24px}
header{padding-top:44px}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Georgia,serif;font-weight:600;line-height:1.2;
letter-spacing:-.01em;text-wrap:balance}
h1{font-size:clamp(26px,4.4vw,40px);margin:14px 0 10px;overflow-wrap:anywhere}
h2{font-size:22px;margin:48px 0 14px}
h3{font-size:16px;margin:0 0 2px;font-weight:600}
p{margin:0 0 10px;max-width:72ch}
.soft{color:var(--soft)}
.small{font-size:14px}
.mark{display:flex;align-items:center;gap:10px;font-size:14px;letter-spacing:.04em;color:var(--soft)}
.mark svg{width:34px;height:24px}
.lead{font-size:18px;max-width:62ch}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));margin:26px 0 0;padding:0;
border:1px solid var(--edge);border-radius:10px;background:var(--panel);overflow:hidden}
.cards div{padding:14px 16px 12px;box-shadow:1px 1px 0 var(--edge)}
.cards dt{font-size:13px;color:var(--soft)}
.cards dd{margin:0;font-size:25px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums;white-space:nowrap}
.grid2.charts{align-items:stretch}
.grid2{display:grid;align-items:start;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px;margin-bottom:20px}
figure{margin:0;padding:18px 18px 12px;background:var(--panel);border:1px solid var(--edge);border-radius:10px;
min-width:0;display:flex;flex-direction:column}
figcaption p{font-size:14px;color:var(--soft);margin:0 0 8px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:4px 0 6px;padding:0;list-style:none;font-size:14px}
.legend li{display:flex;align-items:center;gap:7px}
.swatch{width:26px;height:14px;flex:none}
.chart{display:block;width:100%;height:auto;margin-top:auto}
.chart text{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.chart .note{fill:var(--ink);paint-order:stroke;stroke:var(--panel);stroke-width:4px;stroke-linejoin:round}
.end{text-anchor:end}.middle{text-anchor:middle}
.gridline,.grid{stroke:var(--grid);stroke-width:1;fill:none}
.axis{stroke:var(--soft);stroke-width:1;fill:none}
.line{fill:none;stroke:var(--ink);stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.dot{stroke:var(--panel);stroke-width:1.2;fill:var(--ink)}
.rule{fill:none;stroke:var(--soft);stroke-width:1.2;stroke-dasharray:2 3}
.band{stroke:none}
.hidden{position:absolute}
.hatch{stroke:var(--hatch);stroke-width:1.3;fill:none}
.line.s-prefill,.rule.s-prefill{stroke:var(--prefill)}.dot.s-prefill,.ground-prefill{fill:var(--prefill)}
.line.s-decode,.rule.s-decode{stroke:var(--decode)}.line.s-decode{stroke-dasharray:7 4}
.dot.s-decode,.band.s-decode{fill:var(--decode)}
.line.s-mixed{stroke:var(--mixed);stroke-dasharray:2 4}.dot.s-mixed,.ground-mixed{fill:var(--mixed)}
.line.s-whole{stroke:var(--ink);stroke-dasharray:12 4 2 4}
.line.s-decode-solid{stroke:var(--decode)}
.line.s-green{stroke:var(--green);stroke-dasharray:10 3}.dot.s-green{fill:var(--green)}
.line.s-down{stroke:var(--down);stroke-dasharray:4 2}.dot.s-down,.ground-down{fill:var(--down)}
.band.s-prefill{fill:url(#fill-prefill)}.band.s-mixed{fill:url(#fill-mixed)}.band.s-down{fill:url(#fill-down)}
.band.s-idle{fill:var(--grid)}
.scroll{overflow-x:auto;border:1px solid var(--edge);border-radius:10px;background:var(--panel);margin:0 0 20px}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--decode);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:15px}
caption{text-align:left;font-weight:600;padding:12px 16px 6px}
th,td{padding:6px 16px;text-align:right;white-space:nowrap;font-weight:400}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--soft);font-size:13px;border-bottom:1px solid var(--edge)}
tbody tr+tr>*{border-top:1px solid var(--grid)}
tbody tr:last-child>*{padding-bottom:12px}
pre{margin:0;padding:14px 16px;font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);border:1px solid var(--edge);border-radius:10px}
.word{white-space:nowrap}
details{margin:14px 0 0}summary{cursor:pointer;padding:4px 0}details pre{margin-top:8px}
footer{padding-top:36px;padding-bottom:44px;font-size:14px;color:var(--soft)}
@media(max-width:520px){main,header,footer{padding-left:16px;padding-right:16px}header{padding-top:24px}
.cards{grid-template-columns:1fr 1fr}.cards dd{font-size:21px}figure{padding:14px 10px 8px}.lead{font-size:16px}
th,td{padding:6px 6px}th:first-child,td:first-child,caption{padding-left:12px}
th:last-child,td:last-child{padding-right:12px}
table{font-size:14px}
tbody th{white-space:normal}h2{margin-top:36px}.chart text{font-size:14px}}
@media print{body{background:#fff}figure,.scroll,pre{break-inside:avoid}}
"""
