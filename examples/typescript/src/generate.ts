// Streams a completion: npx tsx src/generate.ts [HOST:PORT [PROMPT]].
import { Code, ConnectError, createClient } from '@connectrpc/connect';
import { createGrpcTransport } from '@connectrpc/connect-node';
import { FinishReason } from './gen/tokenpod/v1/generation_pb.js';
import { GenerationService } from './gen/tokenpod/v1/generation_service_pb.js';

const [address = '127.0.0.1:50051', prompt = 'def main():\n'] = process.argv.slice(2);
const client = createClient(
  GenerationService,
  createGrpcTransport({ baseUrl: `http://${address}` }),
);

try {
  const request = {
    prompt: { case: 'text' as const, value: prompt },
    stopping: { maxNewTokens: 32 },
  };
  for await (const { event } of client.generate(request, { timeoutMs: 60_000 })) {
    if (event.case === 'tokens' && event.value.delta.case === 'text') {
      process.stdout.write(event.value.delta.value);
    } else if (event.case === 'finished') {
      const { generatedTokenCount, finishReason } = event.value;
      console.log(`\n[${generatedTokenCount} tokens; FINISH_REASON_${FinishReason[finishReason]}]`);
    }
    // Also events of kinds that are yet to come.
  }
} catch (error) {
  const { code, rawMessage } = ConnectError.from(error);
  console.error(`${Code[code]}: ${rawMessage}`);
  process.exitCode = 1;
}
