//! Makes the code of the messages from the protos. No protoc is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protos = "../../protos";
    println!("cargo:rerun-if-changed={protos}/tokenpod/v1");
    let files = protox::compile(["tokenpod/v1/generation_service.proto"], [protos])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}
