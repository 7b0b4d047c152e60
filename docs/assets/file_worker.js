// Lets the search work in pages that are opened from a disk: browsers give those no Worker, so a hidden frame runs its
// script, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.send = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = new URL(url, document.baseURI)
        script.onload = resolve
        script.onerror = reject
        inside.document.body.append(script)
      })
      this.frame = frame
    }

    postMessage(data) {
      this.ready.then(() => this.send(data))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
