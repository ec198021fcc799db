// Let the search work in pages that are opened from the disk, where browsers start no Worker: the script of the search
// runs in a hidden frame instead. The theme's script asks for window.IFrameWorker to find its languages.
"use strict";
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc = "<!doctype html><body></body>"; // of this page's origin, so that both reach each other
    this.ready = new Promise(resolve => { this.frame.onload = resolve; }).then(() => this.start(String(url)));
    document.body.append(this.frame);
  }
  // What a script finds in a Worker: messages to the page, and further scripts one after the other.
  async start(url) {
    const inside = this.frame.contentWindow;
    inside.postMessage = data => {
      const event = new MessageEvent("message", { data: structuredClone(data) });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    };
    const load = src => new Promise((resolve, reject) => {
      const script = Object.assign(inside.document.createElement("script"), { src, onload: resolve, onerror: reject });
      inside.document.body.append(script);
    });
    inside.importScripts = async (...urls) => { for (const each of urls) await load(each); };
    await load(url);
  }
  // Messages wait until the script is there, in their order.
  async postMessage(data) {
    await this.ready;
    this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
  }
  terminate() { this.frame.remove(); }
}
window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
