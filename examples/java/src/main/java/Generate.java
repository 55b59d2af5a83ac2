import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.tokenpod.v1.GenerateRequest;
import io.tokenpod.v1.GenerateResponse;
import io.tokenpod.v1.GenerationServiceGrpc;
import io.tokenpod.v1.StoppingOptions;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;

/** Streams a completion: Generate [HOST:PORT [PROMPT]]. */
public final class Generate {
  public static void main(String[] arguments) throws InterruptedException {
    String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    String prompt = arguments.length > 1 ? arguments[1] : "def main():\n";
    ManagedChannel channel =
        Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
    try {
      generate(channel, prompt);
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus().getCode() + ": " + error.getStatus().getDescription());
      System.exit(1);
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  private static void generate(ManagedChannel channel, String prompt) {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(prompt)
            .setStopping(StoppingOptions.newBuilder().setMaxNewTokens(32))
            .build();
    Iterator<GenerateResponse> events =
        GenerationServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(60, TimeUnit.SECONDS)
            .generate(request);
    while (events.hasNext()) {
      GenerateResponse event = events.next();
      switch (event.getEventCase()) {
        case TOKENS -> System.out.print(event.getTokens().getText());
        case FINISHED ->
            System.out.printf(
                "%n[%d tokens; %s]%n",
                event.getFinished().getGeneratedTokenCount(), event.getFinished().getFinishReason());
        default -> {} // Also events of kinds that are yet to come.
      }
    }
  }
}
