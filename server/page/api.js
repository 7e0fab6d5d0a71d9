// The daemon's routes, relative to this page, with the key that the person gave for this tab.

export const useKey = (key) => sessionStorage.setItem("octavo-key", key); // "" for none

// A good response. Throws an Error with the status in `status` and the server's words, 0 when no server has answered;
// an AbortError when it was stopped.
export async function call(path, init = {}) {
  const key = sessionStorage.getItem("octavo-key");
  const headers = { ...init.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { cache: "no-store", ...init, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : Object.assign(new Error("The daemon does not answer."), { status: 0 });
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? response.statusText), { status: response.status });
}
