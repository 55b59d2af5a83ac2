// Stream a completion: node generate.js [ADDRESS] [PROMPT]
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address = "localhost:50051", prompt = "import os\n\ndef "] = process.argv.slice(2);
const proto = process.env.TOKENPOD_PROTO ||
  path.join(__dirname, "../../protos/generate/v3/generate.proto");
const { generate } = grpc.loadPackageDefinition(loader.loadSync(proto, { longs: String, enums: String }));

const client = new generate.v3.TextGenerationService(address, grpc.credentials.createInsecure());
const call = client.Generate(
  { text: prompt, stopping: { maxNewTokens: 32 } },
  { deadline: Date.now() + 60_000 },
);

call.on("data", ({ tokens, finished }) => {
  if (tokens) process.stdout.write(tokens.text);
  if (finished) console.log(`\n[${finished.reason}]`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
