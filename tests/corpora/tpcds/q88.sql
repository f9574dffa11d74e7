-- Eight half hours side by side: eight one-row tables.
select *
from (
  select count(*) as h8_30_to_9
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 8 and t_minute >= 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s1
cross join (
  select count(*) as h9_to_9_30
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 9 and t_minute < 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s2
cross join (
  select count(*) as h9_30_to_10
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 9 and t_minute >= 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s3
cross join (
  select count(*) as h10_to_10_30
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 10 and t_minute < 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s4
cross join (
  select count(*) as h10_30_to_11
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 10 and t_minute >= 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s5
cross join (
  select count(*) as h11_to_11_30
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 11 and t_minute < 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s6
cross join (
  select count(*) as h11_30_to_12
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 11 and t_minute >= 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s7
cross join (
  select count(*) as h12_to_12_30
  from store_sales
  join household_demographics on hd_demo_sk = ss_hdemo_sk
  join time_dim on t_time_sk = ss_sold_time_sk
  join store on s_store_sk = ss_store_sk
  where t_hour = 12 and t_minute < 30 and s_store_name = 'ese'
    and (
      (hd_dep_count = 4 and hd_vehicle_count <= 4 + 2)
      or (hd_dep_count = 2 and hd_vehicle_count <= 2 + 2)
      or (hd_dep_count = 0 and hd_vehicle_count <= 0 + 2)
    )
) as s8
