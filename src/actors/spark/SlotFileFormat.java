package org.apache.spark.sql.execution.datasources.parquet;

import java.util.Iterator;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.types.StructType;

/**
 * Reads slot files: Parquet whose reader is told what it needs of Hadoop's configuration.
 *
 * A configuration has over a thousand entries. Spark serializes, compresses and keeps one for each
 * scan of a plan, and copies it for each scan of each task: more than reading a few rows takes.
 * Slot files are local, so that only what is of Parquet and of Spark SQL matters.
 */
public class SlotFileFormat extends ParquetFileFormat {
  private static final String[] KEPT = {"parquet.", "spark.sql.", "fs.file.", "org.apache.spark."};

  public scala.Function1 buildReaderWithPartitionValues(
      SparkSession session,
      StructType data,
      StructType partition,
      StructType required,
      scala.collection.immutable.Seq filters,
      scala.collection.immutable.Map options,
      Configuration whole) {
    Configuration kept = new Configuration(false);
    Iterator entries = whole.iterator();
    while (entries.hasNext()) {
      Map.Entry entry = (Map.Entry) entries.next();
      String name = (String) entry.getKey();
      for (int i = 0; i < KEPT.length; i++) {
        if (name.startsWith(KEPT[i])) {
          kept.set(name, (String) entry.getValue());
        }
      }
    }
    return super.buildReaderWithPartitionValues(
        session, data, partition, required, filters, options, kept);
  }
}
