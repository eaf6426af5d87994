// What a page or a dashboard would do, with types that are generated from openapi.yaml and nothing else.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

const [url, key] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { Authorization: `Bearer ${key}` } });

type Answer = components["schemas"]["AnswerDocument"];

function say(what: string, value: unknown): void {
  console.log(JSON.stringify({ what, value }));
}

const graph: components["schemas"]["GraphDocument"] = {
  format: "remat-graph/1",
  fixed_bytes: 0,
  op_cost_ns: [120, 80, 200, 150, 90],
  op_workspace_bytes: [0, 0, 64, 0, 0],
  op_inputs: [[], [0], [1], [1, 2], [0, 3]],
  value_op: [0, 1, 2, 3, 4],
  value_bytes: [400, 300, 200, 300, 100],
  keep: [4],
};

const about = await client.GET("/v1/capabilities");
if (about.error) throw new Error(about.error.detail);
say("version", about.data.version);

const posted = await client.POST("/v1/solves", {
  body: { problem: { graph, budget_bytes: 1300 }, time_limit_s: 10 },
  params: { header: { Prefer: "wait=20", "Idempotency-Key": "one" } },
});
if (posted.error) throw new Error(posted.error.detail);
const answer: Answer = posted.data;
say("status", answer.status);
say("cost_ns", answer.cost_ns);

const polled = await client.GET("/v1/solves/{solve_id}", {
  params: { path: { solve_id: answer.id ?? "" }, query: { wait: 1 } },
});
say("polled", polled.data?.cost_ns);

const timeline = await client.GET("/v1/solves/{solve_id}/timeline", { params: { path: { solve_id: answer.id ?? "" } } });
say("steps", timeline.data?.plan?.start_ns.length);

const listed = await client.GET("/v1/solves", { params: { query: { limit: 10 } } });
say("listed", listed.data?.solves.length);

const swept = await client.POST("/v1/sweeps", { body: { graph, points: 3 } });
if (swept.error) throw new Error(swept.error.detail);
say("swept", swept.data.id.length);

const refused = await client.POST("/v1/solves", { body: { problem: { graph: { ...graph, keep: [9] }, budget_bytes: 1 } } });
say("refused", [refused.error?.status, refused.error?.pointer]);
