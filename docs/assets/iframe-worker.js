// A page that is opened from the disk (file:) may not start a worker from a file, so the search runs in a
// hidden frame instead: the frame gets the script, and messages go through postMessage.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      this._waiting = [];
      this._frame = document.createElement("iframe");
      this._frame.hidden = true;
      document.body.append(this._frame);
      const inside = this._frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", {data});
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.importScripts = (...addresses) => Promise.all(addresses.map((one) => this._load(one)));
      this._load(address).then(() => {
        this._isReady = true;
        this._waiting.forEach((data) => this._deliver(data));
      });
    }
    _load(address) {
      return new Promise((resolve) => {
        const script = this._frame.contentDocument.createElement("script");
        script.src = new URL(address, location.href);
        script.onload = resolve;
        this._frame.contentDocument.body.append(script);
      });
    }
    _deliver(data) {
      const event = new MessageEvent("message", {data});
      const inside = this._frame.contentWindow;
      inside.dispatchEvent(event);
    }
    postMessage(data) {
      if (this._isReady) this._deliver(data); else this._waiting.push(data);
    }
    terminate() { this._frame.remove(); }
  };
}
