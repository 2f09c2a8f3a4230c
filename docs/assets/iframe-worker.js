// Pages opened from a folder may not start workers. Search then runs in a hidden frame with the same interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      this.heard = (event) => {
        if (event.source !== inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      window.addEventListener("message", this.heard);
      inner.document.open();
      inner.document.write(
        "<!doctype html><title>search</title><script>postMessage = (data) => parent.postMessage(data, '*');" +
        "importScripts = (...urls) => Promise.all(urls.map((url) => new Promise((done) => {" +
        "const s = document.createElement('script'); s.src = url; s.onload = done; document.head.appendChild(s); })));" +
        '</scr' + 'ipt><script src="' + url + '"></scr' + "ipt>"
      );
      inner.document.close();
      this.ready = new Promise((done) => inner.addEventListener("load", done));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      window.removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
}
