// Browsers refuse workers in pages that were opened from a folder, and the search runs in one.
// There, and only there, an invisible frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.onmessage = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      const inside = frame.contentWindow
      this.ready = new Promise(done => {
        inside.importScripts = (...addresses) => Promise.all(addresses.map(source => load(inside, source)))
        inside.postMessage = data => {
          const event = new MessageEvent("message", { data })
          this.dispatchEvent(event)
          if (this.onmessage) this.onmessage(event)
        }
        load(inside, address).then(done)
      })
      this.inside = inside
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
  function load(inside, address) {
    return new Promise((done, failed) => {
      const script = inside.document.createElement("script")
      script.src = address
      script.onload = () => done()
      script.onerror = failed
      inside.document.documentElement.appendChild(script)
    })
  }
}
