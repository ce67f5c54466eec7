// A charge server on @node-idempotency/core with its memory adapter. What it
// puts around the core is what the project's own NestJS interceptor does (package
// @node-idempotency/nestjs 1.0.4): the same statuses, headers and stored
// errors, and bodies as NestJS writes them.
//
// It listens on a free port of 127.0.0.1, prints it, and ends with its input.
//
//   POST /charges, /refunds  {"reference":"order-1"}
//   GET  /effects            how many were made, by reference
//   POST /handler            {"delay":300,"fail":"before"}: what the handler does from now on
import { createServer } from "node:http";
import { Idempotency, IdempotencyError, IdempotencyErrorCodes as codes } from "@node-idempotency/core";
import { MemoryStorageAdapter } from "@node-idempotency/storage-adapter-memory";

const idempotency = new Idempotency(new MemoryStorageAdapter(), { enforceIdempotency: true });
const statusOf = {
  [codes.IDEMPOTENCY_FINGERPRINT_MISSMATCH]: 422,
  [codes.IDEMPOTENCY_KEY_LEN_EXEEDED]: 400,
  [codes.IDEMPOTENCY_KEY_MISSING]: 400,
  [codes.REQUEST_IN_PROGRESS]: 409,
};
const effects = {};
let calls = 0;
let handler = {};

const failure = (statusCode, message) => ({ statusCode, body: { statusCode, message } });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// charge is the application. fail: "before" or "after" the effect, once;
// "crash": it never comes to an end that the core hears of.
async function charge(body) {
  calls++;
  const { delay = 0, fail = "" } = handler;
  if (fail !== "") handler = { delay };
  await sleep(delay);
  if (fail === "before") return { error: failure(500, "no connection to the bank") };
  if (fail === "crash") return { crashed: true };
  effects[body.reference] = (effects[body.reference] ?? 0) + 1;
  if (fail === "after") return { error: failure(500, "no receipt printer") };
  return { statusCode: 201, body: { id: "ch_" + body.reference } };
}

async function protectedCharge(request, body, send, destroy) {
  const asked = { headers: request.headers, body, path: request.url, method: request.method };
  let stored;
  try {
    stored = await idempotency.onRequest(asked);
  } catch (err) {
    if (!(err instanceof IdempotencyError)) throw err;
    const { statusCode, body } = failure(statusOf[err.code] ?? 500, err.message);
    return send(statusCode, body, err.code === codes.REQUEST_IN_PROGRESS ? { "Retry-After": "1" } : {});
  }
  if (stored) {
    const { statusCode, body } = stored.error ?? { statusCode: stored.additional.statusCode, body: stored.body };
    return send(statusCode, body, { "Idempotent-Replayed": "true" });
  }
  const made = await charge(body);
  if (made.crashed) return destroy();
  const { statusCode } = made.error ?? made;
  await idempotency.onResponse(asked, { additional: { statusCode }, body: made.body, error: made.error });
  send(statusCode, (made.error ?? made).body);
}

const server = createServer(async (request, response) => {
  const send = (status, body, headers = {}) => {
    const text = JSON.stringify(body);
    response.writeHead(status, { "Content-Type": "application/json", "Content-Length": Buffer.byteLength(text), ...headers });
    response.end(text);
  };
  try {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const text = Buffer.concat(chunks).toString();
    const body = text === "" ? {} : JSON.parse(text);
    switch (`${request.method} ${request.url}`) {
      case "POST /charges":
      case "POST /refunds":
        return await protectedCharge(request, body, send, () => request.socket.destroy());
      case "POST /handler":
        handler = body;
        return send(200, {});
      case "GET /effects":
        return send(200, { effects, calls });
    }
    send(404, { statusCode: 404, message: "Not Found" });
  } catch (err) {
    if (!response.headersSent) send(500, { statusCode: 500, message: String(err) });
  }
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
process.stdin.on("end", () => process.exit()).resume(); // the test is gone
