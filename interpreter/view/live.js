"use strict";
// Reads on in the file that the server follows. A batch that begins the file anew begins the page anew, also when the
// one before had ended, so the page asks on, slowly.
(async () => {
  const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
  const decoder = new TextDecoder();
  let place = 0, view = "";
  $("facts").textContent = "waiting for the first line";
  for (;;) {
    let answer = null, data = null;
    try {
      answer = await fetch(String(place), {cache: "no-store"});
      if (answer.ok) data = await answer.arrayBuffer();
    } catch (error) { if (!(error instanceof TypeError)) throw error; }
    const anew = data !== null && place > 0 && answer.headers.get("View") !== view;
    $("trouble").textContent = data === null && !batch.end ? "the server of this page does not answer" : "";
    if (anew) {
      place = 0;
      forget();
    } else if (data !== null && data.byteLength) {
      view = answer.headers.get("View");
      place += data.byteLength;
      take(decoder.decode(data));
    } else await pause(data === null || batch.end ? 2000 : 300);
  }
})();
