"use strict";
// Reads on in the file that the server follows, until its last line says that the batch has ended.
(async () => {
  const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
  const decoder = new TextDecoder();
  let place = 0;
  $("facts").textContent = "waiting for the first line";
  while (!batch.end) {
    let data = null;
    try {
      const answer = await fetch(String(place), {cache: "no-store"});
      if (answer.ok) data = await answer.arrayBuffer();
    } catch (error) { if (!(error instanceof TypeError)) throw error; }
    $("trouble").textContent = data === null ? "the server of this page does not answer" : "";
    if (data !== null && data.byteLength) {
      place += data.byteLength;
      take(decoder.decode(data));
    } else await pause(data === null ? 2000 : 300);
  }
})();
