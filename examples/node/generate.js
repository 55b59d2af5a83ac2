// Stream a completion: node generate.js [HOST:PORT [PROMPT]]
'use strict';

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

// The wire contract itself: copy protos/tokenpod/v1 into a project of your own.
const PROTOS = path.join(__dirname, '../../protos');
const PROTO = 'tokenpod/v1/generation_service.proto';
const [address = '127.0.0.1:50051', prompt = 'def main():\n'] = process.argv.slice(2);

const options = { keepCase: true, enums: String, longs: Number, includeDirs: [PROTOS] };
const definition = protoLoader.loadSync(PROTO, options);
const { GenerationService } = grpc.loadPackageDefinition(definition).tokenpod.v1;

const client = new GenerationService(address, grpc.credentials.createInsecure());
const deadline = new Date(Date.now() + 60_000);
const request = { text: prompt, stopping: { max_new_tokens: 32 } };

const stream = client.generate(request, new grpc.Metadata(), { deadline });
stream.on('data', ({ tokens, finished }) => {
  if (tokens) process.stdout.write(tokens.text ?? '');
  if (finished) console.log(`\n[${finished.generated_token_count} tokens; ${finished.finish_reason}]`);
});
stream.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on('close', () => client.close());
