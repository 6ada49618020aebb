/* Where the site is read from the disk, browsers start no workers: this runs the one of the search in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        document.addEventListener("readystatechange", resolve, { once: true });
        if (document.body) resolve();
      }).then(() => new Promise((resolve, reject) => {
        document.body.appendChild(frame);
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.run(inside, each)));
        this.run(inside, url).then(() => resolve(inside), reject);
      }));
    }
    run(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = reject;
        inside.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
