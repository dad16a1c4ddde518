// Browsers refuse workers to pages that are opened as files. There, the search runs in a hidden frame
// with the two functions of a worker that it uses: it hears "message" events, and calls postMessage.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.loaded = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = () => resolve(inner);
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
