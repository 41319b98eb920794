// The search runs in a Worker, which browsers refuse to pages that are opened as files: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.send = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = url
        script.onload = () => resolve((data) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
        script.onerror = reject
        frame.contentDocument.body.append(script)
      })
    }

    postMessage(data) {
      this.send.then((send) => send(data))
    }
  }
}
