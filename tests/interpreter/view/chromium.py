"""Opens pages in a headless Chromium, runs a script in them and returns what it reports."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(FOUND is None, reason="no chromium, chromium-browser or google-chrome on PATH")

# The report is an element of the page: Chromium prints the page when the script's promise is settled, or has failed.
_SCRIPT = """
<script>
const failures = [];
addEventListener("error", (event) => failures.push(String(event.message)));
</script>
%s
<script>
(async () => {
  const pause = () => new Promise((resolve) => setTimeout(resolve, 200));
  let report;
  try { report = await (async () => { %s })(); } catch (error) { failures.push(String(error.stack)); }
  const box = document.createElement("pre");
  box.id = "report";
  box.textContent = JSON.stringify({report, failures});
  // Chromium prints no page that has halves of characters in its text.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.toWellFormed();
  for (const each of document.querySelectorAll("[title]")) each.title = "";
  document.body.append(box);
})();
</script>
"""


def run_in_page(page: str, script: str, folder: Path) -> Any:
    """Opens a page and runs the body of an async function in it; `await pause()` lets timers and drawing run.

    Returns what it returns. Fails on an error of the page, and on anything in its console.
    """
    assert FOUND is not None, "the test is marked with needs_chromium"
    head, data = page.split("<body>", 1)
    file = folder / "page.html"
    file.write_text(head + "<body>" + _SCRIPT % (data.replace("</body>", "").replace("</html>", ""), script))
    command = [
        FOUND,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1300,900",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == [], "\n".join(console)
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    told = json.loads(html.unescape(found[1]))
    assert told["failures"] == []
    return told.get("report")
