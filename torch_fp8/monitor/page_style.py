"""The style sheet of the report."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #616e7c; --line: #e4e7eb;
  --back: #f5f7fa; --paper: white; --good: #dff3ea; --good-ink: #14694c; --bad: #fde4e1;
  --bad-ink: #9b2c2c; --note: #fff6d6; --note-line: #f0d98a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa5b1; --line: #323b45; --back: #12171d; --paper: #1c232b;
    --good: #143d30; --good-ink: #8fe0bf; --bad: #4f2020; --bad-ink: #ffb3ab; --note: #3d3413;
    --note-line: #6b5b1f; }
  .wide { background: white; border-radius: 8px; padding: 6px; filter: brightness(0.92); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 28px; margin: 0; letter-spacing: -0.01em; }
h1, p, .what { overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 6px; }
.options { color: var(--soft); margin: 2px 0 10px; }
.verdict { display: inline-block; margin: 0 0 14px; padding: 5px 14px; border-radius: 99px;
  font-weight: 600; }
.verdict.good { background: var(--good); color: var(--good-ink); }
.verdict.bad { background: var(--bad); color: var(--bad-ink); }
.note { background: var(--note); border: 1px solid var(--note-line); border-radius: 8px;
  padding: 8px 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; }
.tiles div, section { background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; }
.tiles div { padding: 12px 16px; }
.tiles b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
section { margin-top: 16px; padding: 16px 18px; }
.meaning { color: var(--soft); margin: 0 0 10px; max-width: 100ch; }
.quiet { color: var(--soft); margin: 0; }
img { width: 100%; display: block; }
.wide { overflow-x: auto; }
.scroll { overflow: auto; max-height: 460px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; position: sticky; top: 0;
  background: var(--paper); white-space: nowrap; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12.5px;
  overflow-wrap: anywhere; }
td i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
td:nth-child(2) { white-space: nowrap; }
.bar { width: 120px; height: 9px; border-radius: 5px; background: var(--line); margin-top: 6px;
  overflow: hidden; }
.bar div { height: 100%; }
.bar.fine div { background: #2d9d78; }
.bar.near div { background: #e0a100; }
.bar.over div { background: #d64545; }
@media (max-width: 700px) {
  main { padding: 18px 10px 30px; }
  section { padding: 14px 12px; }
  .wide img { width: 760px; max-width: none; }
  .worst, .worst tbody { display: block; }
  .worst tr { display: flex; flex-wrap: wrap; gap: 0 12px; padding: 6px 0;
    border-bottom: 1px solid var(--line); }
  .worst tr:first-child { display: none; }
  .worst td { border: 0; padding: 0; }
  .worst td.name { flex: 0 0 100%; }
  .worst td[data-is]::before { content: attr(data-is) " "; color: var(--soft); }
  .bar { width: 90px; }
}
footer { color: var(--soft); font-size: 13px; margin-top: 18px; }
"""
