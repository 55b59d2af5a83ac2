// Streams a completion: go run . [HOST:PORT [PROMPT]].
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tokenpod/tokenpod/gen/go/tokenpod/v1"
)

func main() {
	address, prompt := "127.0.0.1:50051", "def main():\n"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	if err := generate(address, prompt); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

func generate(address, prompt string) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	most := uint32(32)
	stream, err := pb.NewGenerationServiceClient(connection).Generate(ctx, &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: prompt},
		Stopping: &pb.StoppingOptions{MaxNewTokens: &most},
	})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if tokens := event.GetTokens(); tokens != nil {
			fmt.Print(tokens.GetText())
		} else if finished := event.GetFinished(); finished != nil {
			fmt.Printf("\n[%d tokens; %s]\n", finished.GeneratedTokenCount, finished.FinishReason)
		}
	}
}
