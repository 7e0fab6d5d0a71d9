// The daemon's routes, relative to this page, with the key that the person gave for this tab.

export function useKey(key) {
  if (key) sessionStorage.setItem("octavo-key", key);
  else sessionStorage.removeItem("octavo-key");
}

// A good response. Throws an Error in the server's words with the status in `status`, which is missing when no server
// has answered.
export async function call(path, init = {}) {
  const key = sessionStorage.getItem("octavo-key");
  const headers = { ...init.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { cache: "no-store", ...init, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? response.statusText), { status: response.status });
}
