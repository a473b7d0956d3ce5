/* Browsers start no worker for a page that was opened from a disk: there the search runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((done) => {
        this.frame.onload = () => {
          const inner = this.frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = url;
          script.onload = () => done(inner);
          inner.document.head.append(script);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
