//! Streams a completion: cargo run -q -- [HOST:PORT [PROMPT]].
use std::io::Write;
use std::time::Duration;

use tonic::{Request, Status};

#[allow(clippy::all)]
mod pb {
    tonic::include_proto!("tokenpod.v1");
}

use pb::generate_request::Prompt;
use pb::generate_response::Event;
use pb::generation_service_client::GenerationServiceClient;
use pb::tokens::Delta;
use pb::{FinishReason, GenerateRequest, StoppingOptions};

async fn generate(address: String, prompt: String) -> Result<(), Box<dyn std::error::Error>> {
    let mut client = GenerationServiceClient::connect(format!("http://{address}")).await?;
    let mut request = Request::new(GenerateRequest {
        prompt: Some(Prompt::Text(prompt)),
        stopping: Some(StoppingOptions { max_new_tokens: Some(32), ..Default::default() }),
        ..Default::default()
    });
    request.set_timeout(Duration::from_secs(60));
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(answer) = stream.message().await? {
        match answer.event {
            Some(Event::Tokens(tokens)) => {
                if let Some(Delta::Text(text)) = tokens.delta {
                    print!("{text}");
                    std::io::stdout().flush()?;
                }
            }
            Some(Event::Finished(finished)) => {
                let reason = FinishReason::try_from(finished.finish_reason)?.as_str_name();
                println!("\n[{} tokens; {reason}]", finished.generated_token_count);
            }
            // Also events of kinds that are yet to come.
            _ => {}
        }
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or("127.0.0.1:50051".into());
    let prompt = arguments.next().unwrap_or("def main():\n".into());
    if let Err(error) = generate(address, prompt).await {
        match error.downcast_ref::<Status>() {
            Some(status) => eprintln!("{:?}: {}", status.code(), status.message()),
            None => eprintln!("{error}"),
        }
        std::process::exit(1);
    }
}
