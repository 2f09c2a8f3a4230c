// Questions to this machine's explorer. A refusal becomes an Error whose message is shown on the page.

async function answer(response) {
  let value = null;
  try {
    value = await response.json();
  } catch {
    throw new Error(`the explorer answered with status ${response.status}`);
  }
  if (!response.ok) throw new Error(value?.error?.message ?? `status ${response.status}`);
  return value;
}

async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the explorer does not answer; is it still running in its terminal?");
  }
  return answer(response);
}

export const get = (path) => ask(`/api/${path}`);

export const post = (path, value, signal = undefined) =>
  ask(`/api/${path}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value), signal });

export function upload(file, invert) {
  const form = new FormData();
  form.append("file", file);
  form.append("invert", invert ? "yes" : "no");
  return ask("/api/uploads", { method: "POST", body: form });
}

export const picture = (name) => `/api/images/${name}.png`;
